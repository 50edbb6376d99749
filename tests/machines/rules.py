changes = []
