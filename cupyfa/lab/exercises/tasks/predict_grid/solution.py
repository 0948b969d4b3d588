def launch(batch, heads, M, d, Br, Bc):
    """Returns fa2's blocks, threads and shared bytes per block, and resident blocks per SM."""
    # hole
    blocks = batch * heads * -(-M // Br)
    threads = Br
    shared_bytes = 4 * (2 * Br * d + 2 * Bc * d + Br * Bc)
    by_memory = 233_472 // (shared_bytes + 1_024)
    by_threads = 2_048 // threads
    resident = min(by_memory, by_threads, 32)
    # end
    return blocks, threads, shared_bytes, resident
