#pragma once
// Number types of expressions. The host prints a user's expression as C++ on these types:
//
//  - Dual<n>: a number and its n derivatives. Forward kernels use Real, which has none; backward
//    kernels use Dual<1>, which holds the derivative with respect to the score;
//  - Index: the position of a query, key, head or batch element; Whole: an integer computed from
//    positions; int and long long: integers of arrays and of the expression; __int128: elements of
//    uint64 and results computed from them;
//  - bool: conditions. & and | evaluate both sides, so that no branch keeps loads inside a loop.
//
// Numbers have the type `real`, which the host defines. In double, functions have full precision.
// In float they take few instructions, because a kernel can afford only about 20 per score:
//  - x / y multiplies by a reciprocal, which is computed outside of loops where y is constant;
//  - exp, sigmoid and tanh use the special function units for 2^x and 1/x, sin and cos their own,
//    with an absolute error of a few units in the last place of 1. Near 0, tanh and sin use
//    polynomials, because cap * tanh(x / cap), for example, needs a small error relative to x;
//  - a position is converted to float once for all elements of a tile.

#include <attention/bounded.cuh>
#include <attention/score_context.cuh>
#include <ptx/min_or_nan.cuh>
#include <ptx/opaque.cuh>
#include <tile/math.cuh>
#include <tile/warp.cuh>

// -------------------------------------------------------------------------------------------------
// Functions of float and double

namespace elementary {

constexpr real largest = sizeof(real) == 8 ? real(1.7976931348623157e308) : real(3.4028234e38);

__device__ __forceinline__ float reciprocal(float x) {
  return __fdividef(1, x);
}
__device__ __forceinline__ double reciprocal(double x) {
  return 1 / x;
}
__device__ __forceinline__ float divide(float x, float y) {
  return x * reciprocal(y);
}
__device__ __forceinline__ double divide(double x, double y) {
  return x / y;
}
__device__ __forceinline__ float fused(float x, float y, float z) {
  return fmaf(x, y, z);
}
__device__ __forceinline__ double fused(double x, double y, double z) {
  return fma(x, y, z);
}
__device__ __forceinline__ float exp2(float x) {
  return exp2f(x);
}
__device__ __forceinline__ double exp2(double x) {
  return ::exp2(x);
}
__device__ __forceinline__ float exp(float x) {
  return exp2f(x * log2e);
}
__device__ __forceinline__ double exp(double x) {
  return ::exp(x);
}
__device__ __forceinline__ float log(float x) {
  return logf(x);
}
__device__ __forceinline__ double log(double x) {
  return ::log(x);
}
__device__ __forceinline__ float log1p(float x) {
  return log1pf(x);
}
__device__ __forceinline__ double log1p(double x) {
  return ::log1p(x);
}
__device__ __forceinline__ float expm1(float x) {
  return expm1f(x);
}
__device__ __forceinline__ double expm1(double x) {
  return ::expm1(x);
}
__device__ __forceinline__ float rsqrt(float x) {
  return rsqrtf(x);
}
__device__ __forceinline__ double rsqrt(double x) {
  return 1 / ::sqrt(x);
}
// Avoids the subroutine of the correctly rounded square root; handles 0 and infinity, too.
__device__ __forceinline__ float sqrt(float x) {
  return reciprocal(rsqrtf(x));
}
__device__ __forceinline__ double sqrt(double x) {
  return ::sqrt(x);
}
// Below this |x|, tanh(x) is x + x * tanh_near_0(x * x); above it is 1 - rest_of_tanh(x), whose
// relative error would be large near 0.
constexpr float small_tanh = 0.55f;
__device__ __forceinline__ float tanh_near_0(float s) {
  const float of_s = fmaf(s, 0.0164375622f, -0.0526718013f);
  return s * fmaf(s, fmaf(s, of_s, 0.133207247f), -0.333329469f);
}
// Returns 1 - |tanh(x)| with a small relative error. If exp2f overflows, 2 / infinity is 0.
__device__ __forceinline__ float rest_of_tanh(float x) {
  return 2 * reciprocal(1 + exp2f(fabs(x) * (2 * log2e)));
}
__device__ __forceinline__ double rest_of_tanh(double x) {
  return 2 / (1 + ::exp(2 * fabs(x)));
}
__device__ __forceinline__ float tanh(float x) {
  const float near = fmaf(x, tanh_near_0(x * x), x);
  return fabs(x) < small_tanh ? near : copysign(1 - rest_of_tanh(x), x);
}
__device__ __forceinline__ double tanh(double x) {
  return ::tanh(x);
}
// Returns cap * tanh(x / cap). Terms that depend only on cap are computed outside of loops.
__device__ __forceinline__ float capped(float x, float cap) {
  const float t = x * reciprocal(cap), near = fmaf(x, tanh_near_0(t * t), x);
  return fabs(t) < small_tanh ? near : copysign(fmaf(-cap, rest_of_tanh(t), cap), x);
}
__device__ __forceinline__ double capped(double x, double cap) {
  return cap * ::tanh(x / cap);
}
// Applies the softcap to four scaled products of any magnitude. The four divisions share one
// reciprocal, that of the product of all four powers. Each power is limited to 2^31, where tanh is
// 1, so that this product stays finite.
__device__ __forceinline__ void cap_four(float* products, float scale, float by, float cap) {
  const float exponent = fabs(by) * float(2 * log2e);
  float power[4], far[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) power[i] = 1 + exp2f(fmin(fabs(products[i]) * exponent, 31.0f));
  const float low = power[0] * power[1], high = power[2] * power[3];
  const float both = -2 * cap * reciprocal(low * high);
  const float of_low = both * high, of_high = both * low;
  far[0] = fmaf(of_low, power[1], cap);
  far[1] = fmaf(of_low, power[0], cap);
  far[2] = fmaf(of_high, power[3], cap);
  far[3] = fmaf(of_high, power[2], cap);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float x = products[i] * scale, t = products[i] * by;
    const float near = fmaf(x, tanh_near_0(t * t), x);  // NaN stays NaN
    products[i] = fabs(t) >= small_tanh ? copysign(far[i], x) : near;
  }
}
// Applies the softcap to a lane's products. Usually all products of the warp are small, and only
// the polynomial is evaluated. One branch works on opaque copies, because the compiler would
// otherwise keep values that both branches need in registers for all products.
template <int count>
__device__ __forceinline__ void cap_products(float (&products)[count], float scale, float cap) {
  const float by = scale * reciprocal(cap);
  float largest = 0;
#pragma unroll
  for (int i = 0; i < count; ++i) largest = fmax(largest, fabs(products[i]));
  if (__any_sync(full_warp, !(largest * fabs(by) < small_tanh))) {
    const float own_scale = opaque(scale), own_by = opaque(by);
#pragma unroll
    for (int i = 0; i < count; i += 4) {
#pragma unroll
      for (int j = 0; j < 4; ++j) products[i + j] = opaque(products[i + j]);
      cap_four(products + i, own_scale, own_by, cap);
    }
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const float x = products[i] * scale, t = products[i] * by;
      products[i] = fmaf(x, tanh_near_0(t * t), x);
    }
  }
}
// Applies the softcap with an absolute error of 2^-22 * cap. If one of four is NaN, all become NaN.
template <int count>
__device__ __forceinline__ void cap_approximately(float (&products)[count], float scale,
                                                  float cap) {
  const float by = scale * (2 * log2e * reciprocal(cap));
#pragma unroll
  for (int i = 0; i < count; i += 4) {
    float power[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) power[j] = 1 + exp2f(min_or_nan(products[i + j] * by, 31));
    const float low = power[0] * power[1], high = power[2] * power[3];
    const float both = -2 * cap * reciprocal(low * high);
    const float of_low = both * high, of_high = both * low;
    products[i] = fmaf(of_low, power[1], cap);
    products[i + 1] = fmaf(of_low, power[0], cap);
    products[i + 2] = fmaf(of_high, power[3], cap);
    products[i + 3] = fmaf(of_high, power[2], cap);
  }
}
template <class T>
__device__ __forceinline__ T sigmoid(T x) {
  return reciprocal(1 + exp(-x));
}
template <class T>
__device__ __forceinline__ T softplus(T x) {
  return (x > 0 ? x : T(0)) + log1p(exp(x > 0 ? -x : x));
}
// Subtracts the nearest multiple of 2 pi; two constants represent 2 pi. The special functions
// lose accuracy away from 0, and sinf has a loop for large arguments.
__device__ __forceinline__ float within_a_turn(float x) {
  const float turns = rintf(x * 0.159154943f);
  return fmaf(turns, 1.74845553e-7f, fmaf(turns, -6.28318548f, x));
}
// Near 0 a polynomial replaces the special function, whose error is absolute.
__device__ __forceinline__ float sin(float x) {
  const float turned = within_a_turn(x), s = turned * turned;
  const float of_s = fmaf(s, fmaf(s, -0.00019709f, 0.00833314f), -0.16666666f);
  return fabs(turned) < 0.5f ? fmaf(turned * s, of_s, turned) : __sinf(turned);
}
__device__ __forceinline__ double sin(double x) {
  return ::sin(x);
}
__device__ __forceinline__ float cos(float x) {
  return __cosf(within_a_turn(x));
}
__device__ __forceinline__ double cos(double x) {
  return ::cos(x);
}
__device__ __forceinline__ float erf(float x) {
  return erff(x);
}
__device__ __forceinline__ double erf(double x) {
  return ::erf(x);
}
__device__ __forceinline__ float erfc(float x) {
  return erfcf(x);
}
__device__ __forceinline__ double erfc(double x) {
  return ::erfc(x);
}
template <class T>
__device__ __forceinline__ T slope_of_erf(T x) {
  const T two_by_root_of_pi = 1.1283791670955126;
  return two_by_root_of_pi * exp(-x * x);
}
__device__ __forceinline__ float floor(float x) {
  return floorf(x);
}
__device__ __forceinline__ double floor(double x) {
  return ::floor(x);
}

}  // namespace elementary

// -------------------------------------------------------------------------------------------------
// Types

template <int n>
struct Dual {
  real value, slope[n ? n : 1];

  __device__ __forceinline__ Dual(real value = 0) : value(value), slope() {}
  template <int m>
  __device__ __forceinline__ Dual(const Dual<m>& x) : value(x.value), slope() {
    static_assert(m <= n, "no derivative is lost");
    for (int i = 0; i < m; ++i) slope[i] = x.slope[i];
  }
};
using Real = Dual<0>;

// An integer computed from positions, as int and as real; the compiler removes whichever is unused.
// A float holds it exactly below 2^24.
struct Whole {
  int value;
  real number;

  __device__ __forceinline__ operator int() const { return value; }
};

template <class T>
constexpr bool is_dual = false;
template <int n>
constexpr bool is_dual<Dual<n>> = true;
template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;
template <class T>
constexpr bool is_index = is_same<T, Index> || is_same<T, EvenIndex> || is_same<T, HeldIndex>;
template <class T>
constexpr bool is_own = is_dual<T> || is_index<T> || is_same<T, Whole>;
template <class A, class B>
constexpr bool any_is_dual = is_dual<A> || is_dual<B>;
template <class T>
constexpr bool is_long = is_same<T, long long> || is_same<T, __int128>;
template <class A, class B>
constexpr bool any_is_long = is_long<A> || is_long<B>;
template <class T>
constexpr bool is_linear = is_index<T> || is_same<T, int>;

template <bool condition>
struct When {};
template <>
struct When<true> {
  using type = int;
};
// Enables an operator only if an operand has a type of this header.
template <class A, class B>
using IfOwn = typename When<is_own<A> || is_own<B>>::type;

// number() converts any number to a Dual; integer() converts any integer to a built-in type.
__device__ __forceinline__ Real number(real x) {
  return x;
}
__device__ __forceinline__ Real number(int x) {
  return real(x);
}
__device__ __forceinline__ Real number(long long x) {
  return real(x);
}
__device__ __forceinline__ Real number(__int128 x) {
  return real(x);
}
__device__ __forceinline__ Real number(Index x) {
  return real(x.base) + real(x.more);
}
__device__ __forceinline__ Real number(Whole x) {
  return x.number;
}
template <int n>
__device__ __forceinline__ Dual<n> number(const Dual<n>& x) {
  return x;
}
__device__ __forceinline__ int integer(int x) {
  return x;
}
__device__ __forceinline__ long long integer(long long x) {
  return x;
}
__device__ __forceinline__ __int128 integer(__int128 x) {
  return x;
}
// wide() and widest() convert integers to 64 and to 128 bits.
__device__ __forceinline__ long long wide(long long x) {
  return x;
}
__device__ __forceinline__ __int128 widest(__int128 x) {
  return x;
}
template <int n>
__device__ __forceinline__ Dual<n> wide(const Dual<n>& x) {
  return x;
}

// -------------------------------------------------------------------------------------------------
// Operators

// Applies the chain rule to f(x), with by = f'(x), or to f(x, y) with both partial derivatives.
template <int n>
__device__ __forceinline__ Dual<n> chain(real value, const Dual<n>& x, real by) {
  Dual<n> f(value);
  for (int i = 0; i < n; ++i) f.slope[i] = by * x.slope[i];
  return f;
}
template <int n, int m>
__device__ __forceinline__ auto chain(real value, const Dual<n>& x, real by_x, const Dual<m>& y,
                                      real by_y) {
  Dual<(n > m ? n : m)> f(value);
  for (int i = 0; i < n; ++i) f.slope[i] = by_x * x.slope[i];
  for (int i = 0; i < m; ++i) f.slope[i] += by_y * y.slope[i];
  return f;
}

template <class A, class B, IfOwn<A, B> = 0>
__device__ __forceinline__ auto operator+(const A& a, const B& b) {
  if constexpr (any_is_dual<A, B>) {
    return chain(number(a).value + number(b).value, number(a), 1, number(b), 1);
  } else if constexpr (any_is_long<A, B>) {
    return integer(a) + integer(b);
  } else if constexpr (is_linear<A> && is_linear<B>) {
    const Index x = a, y = b;
    return Index(x.base + y.base, x.more + y.more);
  } else {
    return Whole{int(a) + int(b), number(a).value + number(b).value};
  }
}

template <class A, class B, IfOwn<A, B> = 0>
__device__ __forceinline__ auto operator-(const A& a, const B& b) {
  if constexpr (any_is_dual<A, B>) {
    return chain(number(a).value - number(b).value, number(a), 1, number(b), -1);
  } else if constexpr (any_is_long<A, B>) {
    return integer(a) - integer(b);
  } else if constexpr (is_linear<A> && is_linear<B>) {
    const Index x = a, y = b;
    return Index(x.base - y.base, x.more - y.more);
  } else {
    return Whole{int(a) - int(b), number(a).value - number(b).value};
  }
}

template <class A, class B, IfOwn<A, B> = 0>
__device__ __forceinline__ auto operator*(const A& a, const B& b) {
  if constexpr (any_is_dual<A, B>) {
    const auto x = number(a);
    const auto y = number(b);
    return chain(x.value * y.value, x, y.value, y, x.value);
  } else if constexpr (any_is_long<A, B>) {
    return integer(a) * integer(b);
  } else {
    return Whole{int(a) * int(b), number(a).value * number(b).value};
  }
}

// Returns x * y + z, rounded once. Compilers move unfused products up, where they occupy registers.
template <int n, int m, int k>
__device__ __forceinline__ auto fused(const Dual<n>& x, const Dual<m>& y, const Dual<k>& z) {
  const real value = elementary::fused(x.value, y.value, z.value);
  return chain(value, chain(value, x, y.value, y, x.value), 1, z, 1);
}

template <int n, int m>
__device__ __forceinline__ auto operator/(const Dual<n>& x, const Dual<m>& y) {
  const real quotient = elementary::divide(x.value, y.value), by = elementary::reciprocal(y.value);
  return chain(quotient, x, by, y, -quotient * by);
}

template <int n>
__device__ __forceinline__ Dual<n> operator-(const Dual<n>& x) {
  return chain(-x.value, x, -1);
}
__device__ __forceinline__ Index operator-(Index x) {
  return {-x.base, -x.more};
}
__device__ __forceinline__ Whole operator-(Whole x) {
  return {-x.value, -x.number};
}

template <class A, class B, IfOwn<A, B> = 0>
__device__ __forceinline__ bool operator<(const A& a, const B& b) {
  if constexpr (any_is_dual<A, B>)
    return number(a).value < number(b).value;
  else
    return integer(a) < integer(b);
}
template <class A, class B, IfOwn<A, B> = 0>
__device__ __forceinline__ bool operator<=(const A& a, const B& b) {
  if constexpr (any_is_dual<A, B>)
    return number(a).value <= number(b).value;
  else
    return integer(a) <= integer(b);
}
template <class A, class B, IfOwn<A, B> = 0>
__device__ __forceinline__ bool operator==(const A& a, const B& b) {
  if constexpr (any_is_dual<A, B>)
    return number(a).value == number(b).value;
  else
    return integer(a) == integer(b);
}
template <class A, class B, IfOwn<A, B> = 0>
__device__ __forceinline__ bool operator>(const A& a, const B& b) {
  return b < a;
}
template <class A, class B, IfOwn<A, B> = 0>
__device__ __forceinline__ bool operator>=(const A& a, const B& b) {
  return b <= a;
}
template <class A, class B, IfOwn<A, B> = 0>
__device__ __forceinline__ bool operator!=(const A& a, const B& b) {
  return !(a == b);
}

// -------------------------------------------------------------------------------------------------
// Selection. Both sides are evaluated. The slope is selected, too, not multiplied by 0,
// because the slope of the unselected side may be infinite.

template <class A, class B>
__device__ __forceinline__ auto where(bool condition, const A& a, const B& b) {
  if constexpr (any_is_dual<A, B>) {
    const auto x = number(a);
    const auto y = number(b);
    const decltype(x + y) p = x, q = y;
    auto chosen = p;
    chosen.value = condition ? p.value : q.value;
    for (int i = 0; i < int(sizeof p.slope / sizeof p.slope[0]); ++i)
      chosen.slope[i] = condition ? p.slope[i] : q.slope[i];
    return chosen;
  } else if constexpr (is_same<A, bool>) {
    return condition ? a : b;
  } else if constexpr (any_is_long<A, B>) {
    return condition ? integer(a) : integer(b);
  } else {
    return Whole{condition ? int(a) : int(b), condition ? number(a).value : number(b).value};
  }
}

// Returns NaN if either is NaN, as in NumPy. If both are equal, the slope is that of the first.
template <class A, class B>
__device__ __forceinline__ auto larger(const A& a, const B& b) {
  if constexpr (any_is_dual<A, B>) {
    const real x = number(a).value, y = number(b).value;
    return where(!(x < y) && y == y, a, b);
  } else {
    return where(integer(a) >= integer(b), a, b);
  }
}
template <class A, class B>
__device__ __forceinline__ auto smaller(const A& a, const B& b) {
  if constexpr (any_is_dual<A, B>) {
    const real x = number(a).value, y = number(b).value;
    return where(!(x > y) && y == y, a, b);
  } else {
    return where(integer(a) <= integer(b), a, b);
  }
}

// -------------------------------------------------------------------------------------------------
// Functions

template <int n>
__device__ __forceinline__ Dual<n> exp(const Dual<n>& x) {
  const real y = elementary::exp(x.value);
  return chain(y, x, y);
}
template <int n>
__device__ __forceinline__ Dual<n> exp2(const Dual<n>& x) {
  const real y = elementary::exp2(x.value);
  return chain(y, x, y * real(0.69314718055994531));
}
template <int n>
__device__ __forceinline__ Dual<n> log(const Dual<n>& x) {
  return chain(elementary::log(x.value), x, elementary::reciprocal(x.value));
}
template <int n>
__device__ __forceinline__ Dual<n> log1p(const Dual<n>& x) {
  return chain(elementary::log1p(x.value), x, elementary::reciprocal(1 + x.value));
}
template <int n>
__device__ __forceinline__ Dual<n> expm1(const Dual<n>& x) {
  return chain(elementary::expm1(x.value), x, elementary::exp(x.value));
}
template <int n>
__device__ __forceinline__ Dual<n> sqrt(const Dual<n>& x) {
  return chain(elementary::sqrt(x.value), x, real(0.5) * elementary::rsqrt(x.value));
}
template <int n>
__device__ __forceinline__ Dual<n> rsqrt(const Dual<n>& x) {
  const real y = elementary::rsqrt(x.value);
  return chain(y, x, real(-0.5) * y * y * y);
}
template <int n>
__device__ __forceinline__ Dual<n> tanh(const Dual<n>& x) {
  const real rest = elementary::rest_of_tanh(x.value);
  return chain(elementary::tanh(x.value), x, rest * (2 - rest));
}
template <int n>
__device__ __forceinline__ Dual<n> capped(const Dual<n>& x, Real cap) {
  const real rest = elementary::rest_of_tanh(elementary::divide(x.value, cap.value));
  return chain(elementary::capped(x.value, cap.value), x, rest * (2 - rest));
}
// Computes the slope y * (1 - y) as y * (power * y), which stays accurate where 1 - y is near 0.
template <int n>
__device__ __forceinline__ Dual<n> sigmoid(const Dual<n>& x) {
  const real y = elementary::sigmoid(x.value);
  const real power = fmin(elementary::exp(-x.value), elementary::largest);
  return chain(y, x, y * (power * y));
}
template <int n>
__device__ __forceinline__ Dual<n> softplus(const Dual<n>& x) {
  return chain(elementary::softplus(x.value), x, elementary::sigmoid(x.value));
}
template <int n>
__device__ __forceinline__ Dual<n> sin(const Dual<n>& x) {
  return chain(elementary::sin(x.value), x, elementary::cos(x.value));
}
template <int n>
__device__ __forceinline__ Dual<n> cos(const Dual<n>& x) {
  return chain(elementary::cos(x.value), x, -elementary::sin(x.value));
}
template <int n>
__device__ __forceinline__ Dual<n> erf(const Dual<n>& x) {
  return chain(elementary::erf(x.value), x, elementary::slope_of_erf(x.value));
}
template <int n>
__device__ __forceinline__ Dual<n> erfc(const Dual<n>& x) {
  return chain(elementary::erfc(x.value), x, -elementary::slope_of_erf(x.value));
}
template <int n>
__device__ __forceinline__ Dual<n> floor(const Dual<n>& x) {
  return Real(elementary::floor(x.value));
}

template <int n>
__device__ __forceinline__ Dual<n> abs(const Dual<n>& x) {
  return chain(fabs(x.value), x, real(x.value > 0) - real(x.value < 0));
}
__device__ __forceinline__ Whole abs(Index x) {
  return {abs(int(x)), fabs(number(x).value)};
}
__device__ __forceinline__ Whole abs(Whole x) {
  return {abs(x.value), fabs(x.number)};
}

// The compiler infers that the upper half of the result is 0 for a number of 64 bits.
__device__ __forceinline__ __int128 abs(__int128 x) {
  return x < 0 ? -x : x;
}

template <class T>
__device__ __forceinline__ auto square(const T& x) {
  return x * x;
}

// Rounds a quotient down as Python does, so that the remainder has the sign of the divisor.
template <class T>
__device__ __forceinline__ T rounded_down(T quotient, T x, T y) {
  return quotient - (x != quotient * y && (x ^ y) < 0);
}
// Divides wide integers out of line, because a division takes hundreds of instructions. Dividing
// the lowest number by -1 would trap on a CPU.
template <class T>
__device__ __noinline__ T divided(T x, T y) {
  return y == -1 ? -x : rounded_down(x / y, x, y);
}
template <class A, class B>
__device__ __forceinline__ auto floor_divide(const A& a, const B& b) {
  const auto x = integer(a) + integer(b) * 0;  // in the common type
  const decltype(x) y = integer(b);
  if constexpr (sizeof x > sizeof(int))
    return divided<decltype(x + y)>(x, y);
  else
    return rounded_down(x / y, x, y);
}
template <class A, class B>
__device__ __forceinline__ auto floor_mod(const A& a, const B& b) {
  return integer(a) - floor_divide(a, b) * integer(b);
}
__device__ constexpr int log2_of(int power) {
  return power == 1 ? 0 : 1 + log2_of(power / 2);
}
// Divides by a positive constant; a power of two takes one instruction.
template <int divisor, class A>
__device__ __forceinline__ auto floor_divide(const A& a) {
  if constexpr ((divisor & (divisor - 1)) == 0)
    return integer(a) >> log2_of(divisor);
  else
    return rounded_down(integer(a) / divisor, integer(a), decltype(integer(a))(divisor));
}
template <int divisor, class A>
__device__ __forceinline__ auto floor_mod(const A& a) {
  if constexpr ((divisor & (divisor - 1)) == 0)
    return integer(a) & (divisor - 1);
  else
    return integer(a) - floor_divide<divisor>(a) * divisor;
}

// -------------------------------------------------------------------------------------------------
// Captured arrays

// Converts an array element to its type in expressions: bool, an integer type, or Real.
__device__ __forceinline__ bool element(bool x) {
  return x;
}
__device__ __forceinline__ int element(signed char x) {
  return x;
}
__device__ __forceinline__ int element(unsigned char x) {
  return x;
}
__device__ __forceinline__ int element(short x) {
  return x;
}
__device__ __forceinline__ int element(unsigned short x) {
  return x;
}
__device__ __forceinline__ int element(int x) {
  return x;
}
__device__ __forceinline__ long long element(unsigned x) {
  return x;
}
__device__ __forceinline__ long long element(long long x) {
  return x;
}
__device__ __forceinline__ __int128 element(unsigned long long x) {
  return x;
}
__device__ __forceinline__ Real element(double x) {
  return real(x);
}
template <class Float>
__device__ __forceinline__ Real element(Float x) {
  return real(float(x));
}

template <int bytes>
struct Unsigned;
template <>
struct Unsigned<1> {
  using type = unsigned char;
};
template <>
struct Unsigned<2> {
  using type = unsigned short;
};
template <>
struct Unsigned<4> {
  using type = unsigned;
};

// True for bfloat16, whose bits are the upper half of a float; the host specialises this template.
template <class Element>
constexpr bool is_bfloat16 = false;

// pair_at() loads two neighbouring elements at once; of_pair() extracts one of them.
template <class Element>
__device__ __forceinline__ unsigned pair_at(const Element* there) {
  return *reinterpret_cast<const typename Unsigned<2 * sizeof(Element)>::type*>(there);
}
template <class Element>
__device__ __forceinline__ auto of_pair(unsigned pair, bool second) {
  if constexpr (is_bfloat16<Element>) {
    return Real(__uint_as_float(second ? pair & 0xffff0000 : pair << 16));
  } else {
    using One = typename Unsigned<sizeof(Element)>::type;
    const One one = second ? pair >> 8 * sizeof(Element) : pair;
    return element(reinterpret_cast<const Element&>(one));
  }
}

// A captured array. The host passes data, strides in elements and sizes; the last axis has stride
// 1. in_pairs: rows are aligned to pairs of elements, and keys are read two at a time. is_held: a
// HeldIndex carries an element of this array.
template <class Element, int rank, bool in_pairs = false, bool is_held = false>
struct Array {
  using Type = Element;
  const Element* data;
  long long stride[rank];
  int size[rank];

  // Loads one element. Each index is an Index, Whole, int or long long, or an index that
  // bounded() keeps inside the axis.
  template <class... Indices>
  __device__ __forceinline__ auto read(const Indices&... indices) const {
    static_assert(sizeof...(Indices) == rank, "an index for each axis");
    return read_from<0>(data, 0, indices...);
  }

  // Returns the address at the given indices; omitted trailing indices are 0.
  template <class... Indices>
  __device__ __forceinline__ const Element* row(const Indices&... indices) const {
    long long at = 0;
    int axis = 0;
    ((at += int(indices) * stride[axis++]), ...);
    return data + at;
  }

  // Returns a writable reference to an element.
  template <class... Indices>
  __device__ __forceinline__ Element& at(const Indices&... indices) const {
    return const_cast<Element&>(*row(indices...));
  }

  // Returns the flat index of an element, as if the array were contiguous.
  template <class... Indices>
  __device__ __forceinline__ long long place(const Indices&... indices) const {
    return place_from<0>(0, indices...);
  }

  // Writes the element with a flat index.
  __device__ __forceinline__ void write(long long place, double value) const {
    long long at = 0;
    for (int axis = rank - 1; axis >= 0; --axis) {
      at += place % size[axis] * (axis + 1 == rank ? 1 : stride[axis]);
      place /= size[axis];
    }
    const_cast<Element*>(data)[at] = Element(real(value));
  }

 private:
  template <int axis>
  __device__ __forceinline__ long long place_from(long long before) const {
    return before;
  }
  template <int axis, class I, class... Rest>
  __device__ __forceinline__ long long place_from(long long before, const I& index,
                                                  const Rest&... rest) const {
    long long own;
    if constexpr (is_index<I>)
      own = int(index);
    else
      own = inside(index, axis);
    return place_from<axis + 1>(before * size[axis] + own, rest...);
  }

  // Adds the constant parts of indices to `more`, which becomes the immediate offset of the load.
  template <int axis>
  __device__ __forceinline__ auto read_from(const Element* there, long long more) const {
    return element(there[more]);
  }
  template <int axis, class I, class... Rest>
  __device__ __forceinline__ auto read_from(const Element* there, long long more, const I& index,
                                            const Rest&... rest) const {
    const long long step = axis + 1 == rank ? 1 : stride[axis];
    if constexpr (is_held && axis + 1 == rank && is_same<I, HeldIndex>)
      return of_pair<Element>(index.pair, index.second);
    else if constexpr (in_pairs && axis + 1 == rank && is_same<I, EvenIndex>)
      return of_pair<Element>(pair_at(there + index.base + (more + (index.more & ~1))),
                              index.more & 1);
    else if constexpr (is_index<I>)
      return read_from<axis + 1>(there + index.base * step, more + index.more * step, rest...);
    else
      return read_from<axis + 1>(there + inside(index, axis) * step, more, rest...);
  }

  template <class T>
  __device__ __forceinline__ long long inside(const Bounded<T>& index, int axis) const {
    return index.within(size[axis]);
  }
  __device__ __forceinline__ long long inside(long long index, int) const { return index; }
};

// Records the array elements that an expression reads, and the score's gradient with respect to
// these elements.
template <int count>
struct Tape {
  using Number = Dual<1 + count>;  // derivatives w.r.t. the score and each element
  long long place[count];

  template <int slot, class Array, class... Indices>
  __device__ __forceinline__ Number read(const Array& array, const Indices&... indices) {
    place[slot] = array.place(indices...);
    Number x = number(array.read(indices...));
    x.slope[1 + slot] = 1;
    return x;
  }
};
