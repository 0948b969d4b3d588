// clear_text_sums: zeros for text_gradients.
//
//   largest [arrays], sums and flags [elements]    grid (any)    block (threads)
//   the host sets: threads, shared_bytes and the tape of the texts
static_assert(shared_bytes == 0, "nothing is shared");

extern "C" __global__ __launch_bounds__(threads) void clear_text_sums(unsigned long long* largest,
                                                                      long long* sums,
                                                                      unsigned* flags,
                                                                      Gradients gradients) {
  const long long first = (long long)blockIdx.x * threads + threadIdx.x;
  if (first < arrays) largest[first] = 0;
  for (long long i = first; i < elements; i += (long long)gridDim.x * threads)
    sums[i] = 0, flags[i] = 0;
}
