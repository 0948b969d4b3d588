def cycles(addresses):
    """Returns the cycles of a shared-memory load; ``addresses`` has each lane's byte address."""
    # hole
    words = {address // 4 for address in addresses}
    banks = [word % 32 for word in words]
    return max(banks.count(bank) for bank in banks)
    # end
