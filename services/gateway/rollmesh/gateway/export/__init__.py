"""A closed session as the record that a trainer gets.

May import `conversation` and `protocol`.
"""
