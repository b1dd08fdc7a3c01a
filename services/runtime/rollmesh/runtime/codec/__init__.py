"""The wire forms that services share: token arrays, enums, session records and nested messages.

May import `runtime.errors`.
"""
