"""The store in one SQLite file, with large arrays in files beside it.

Plain functions over a connection; each call of the store is one transaction.
"""
