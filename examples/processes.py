"""Processes that train together: started, joined, watched, and what they save."""
STORES={}
