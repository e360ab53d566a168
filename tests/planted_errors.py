ERRORS = []
def stale(): return []
