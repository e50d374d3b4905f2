"""Views of a module expression: queries, text, pages, graphs, flops and differences."""
