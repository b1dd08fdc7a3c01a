"""The store in one SQLite file, with large arrays in files beside it."""
