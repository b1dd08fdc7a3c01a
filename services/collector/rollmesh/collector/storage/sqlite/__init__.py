"""The store in one SQLite file, with large arrays in separate files.

Each store call is one transaction of the file's only writer; `storage.sql` has the statements.

May import `storage.sql`, `storage.store` and `delivery`.
"""
