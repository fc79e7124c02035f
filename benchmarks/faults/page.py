"""stub"""


def write_page(path, store, rows): ...
