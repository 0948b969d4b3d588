// embed: x[row] = table[tokens[row]].
//
//   tokens [rows], table [vocabulary, width], x [rows, width]
//   grid (rows)    block (threads)
extern "C" __global__ void embed(const int* tokens, const scalar* table, float* x, int width) {
  const scalar* from = table + (long long)tokens[blockIdx.x] * width;
  for (int k = threadIdx.x; k < width; k += blockDim.x)
    x[(long long)blockIdx.x * width + k] = number(from[k]);
}
