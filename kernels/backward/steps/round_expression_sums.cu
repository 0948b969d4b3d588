// round_expression_sums: converts finished sums to gradients in the dtype of each array.
//
//   exponents and flags [elements], sums [words, elements]    grid (any)    block (threads)
//   the host sets: real, words, threads, shared_bytes and the tape of the expressions
#include <backward/parts/exact_sums.cuh>

static_assert(shared_bytes == 0, "nothing is shared");

extern "C" __global__ __launch_bounds__(threads) void round_expression_sums(
    int* exponents, long long* sums, unsigned* flags, int bits, Gradients gradients) {
  const ExactSums exact = {exponents, sums, flags, bits};
  for_gradients(gradients, [&](int array, const auto& gradient) {
    const long long end = array + 1 < arrays ? starts[array + 1] : elements;
    for (long long i = starts[array] + (long long)blockIdx.x * threads + threadIdx.x; i < end;
         i += (long long)gridDim.x * threads)
      gradient.write(i - starts[array], exact.sum(i));
  });
}
