// clear_expression_sums: clears the exponents, sums and flags of expression_gradients.
//
//   exponents and flags [elements], sums [words, elements]    grid (any)    block (threads)
//   the host sets: words, threads, shared_bytes and the tape of the expressions
static_assert(shared_bytes == 0, "nothing is shared");

extern "C" __global__ __launch_bounds__(threads) void clear_expression_sums(int* exponents,
                                                                            long long* sums,
                                                                            unsigned* flags,
                                                                            Gradients gradients) {
  const long long first = (long long)blockIdx.x * threads + threadIdx.x;
  for (long long i = first; i < elements; i += (long long)gridDim.x * threads) {
    exponents[i] = 0, flags[i] = 0;
    for (int word = 0; word < words; ++word) sums[word * elements + i] = 0;
  }
}
