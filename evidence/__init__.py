"""What proves the numbers of the pages: claims, tables, checks."""
