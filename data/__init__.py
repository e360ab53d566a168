"""What is read or drawn, and is no experiment."""
