"""The store in one SQLite file, with large arrays in separate files.

The modules hold plain functions over a connection; each store call is one transaction.
"""
