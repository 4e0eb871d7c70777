"""Why a program is as it is: a `Partition` to text, rows and a page.

`report` says which node runs where, what is copied and what memory is taken; `page` makes one
HTML file of it.
"""
