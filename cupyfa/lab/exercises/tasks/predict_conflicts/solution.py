def cycles(addresses):
    """Returns the cycles of a load from shared memory with these byte addresses of the lanes."""
    # hole
    words = {address // 4 for address in addresses}
    banks = [word % 32 for word in words]
    return max(banks.count(bank) for bank in banks)
    # end
