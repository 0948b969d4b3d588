// Rotary embedding of queries or keys, in place: one block per token, one thread per pair.

constexpr int d = 16, pairs = d / 2;

// x [batch, tokens, d]. cosines, sines [positions, pairs]. lengths [batch]: tokens in the cache.
extern "C" __global__ void rotary(float* x, const float* cosines, const float* sines,
                                  const int* lengths, int tokens) {
  const int batch = blockIdx.x / tokens, token = blockIdx.x % tokens, pair = threadIdx.x;
  float* row = x + blockIdx.x * d;
  // hole
  const int position = lengths[batch] + token;
  const float c = cosines[position * pairs + pair], s = sines[position * pairs + pair];
  const float a = row[pair], b = row[pair + pairs];
  row[pair] = a * c - b * s;
  row[pair + pairs] = b * c + a * s;
  // end
}
