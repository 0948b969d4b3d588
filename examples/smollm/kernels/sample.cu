// sample: draws a token of each row with the probabilities softmax(logits / temperature), as the
// place of the largest logits / temperature + g, where g = -log(-log(u)) are Gumbel numbers (the
// Gumbel-max trick). Temperature 0 takes the largest logit. Of equal ones, the first is taken.
//
// u is a hash of the row's seed, of its position and of the place, so it does not depend on the
// other rows.
//
//   logits [rows, vocabulary], seeds, positions, tokens [rows]
//   grid (rows)    block (1024)
__device__ unsigned hashed(unsigned x) {  // mixes all bits
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

extern "C" __global__ void sample(const float* logits, const unsigned* seeds, const int* positions,
                                  int* tokens, int vocabulary, float temperature) {
  __shared__ unsigned long long best;
  if (threadIdx.x == 0) best = 0;
  __syncthreads();  // before any thread competes for the best
  const int row = blockIdx.x;
  const unsigned key = hashed(seeds[row] ^ hashed(positions[row]));
  unsigned long long mine = 0;
  for (int i = threadIdx.x; i < vocabulary; i += blockDim.x) {
    float x = logits[(long long)row * vocabulary + i];
    if (temperature > 0) {
      const float u = ((hashed(key ^ hashed(i)) >> 9) + 0.5f) / (1 << 23);
      x = x / temperature - logf(-logf(u));
    }
    const unsigned bits = __float_as_uint(x);  // below: an integer in the order of the floats
    const unsigned order = bits >> 31 ? ~bits : bits | 1u << 31;
    mine = max(mine, (unsigned long long)order << 32 | (unsigned)(vocabulary - i));
  }
  atomicMax(&best, mine);
  __syncthreads();  // before thread 0 reads the best of all
  if (threadIdx.x == 0) tokens[row] = vocabulary - (int)(best & 0xffffffffu);
}
