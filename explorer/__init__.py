"""The sources and the maker of explorer.html."""
