// The emulated matrix instructions against PTX's tables of fragments and products by definition.
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "common/cuda_intrinsics.cuh"
#include "common/half.h"

namespace lmdecode {
namespace {

using check::contains;
using check::error_of;
using emulation::launch;

constexpr int kSchedules = 8;

struct MatrixStorage {
  alignas(16) uint16_t rows[32][8];
};

__global__ void load_kernel(const uint16_t* values, bool transposed, int barrier, unsigned* out) {
  MatrixStorage& storage = cuda::shared_storage<MatrixStorage>();
  const unsigned lane = threadIdx.x;
  // Each row is written by another lane than names it.
  for (int i = 0; i < 8; ++i) storage.rows[31 - lane][i] = values[(31 - lane) * 8 + i];
  if (barrier == 1) __syncwarp();
  unsigned to[4];
  if (transposed) {
    cuda::load_transposed_matrices(to, storage.rows[lane]);
  } else {
    cuda::load_matrices(to, storage.rows[lane]);
  }
  for (int i = 0; i < 4; ++i) out[lane * 4 + i] = to[i];
}

bool load(bool transposed, int barrier, uint64_t seed) {
  std::vector<uint16_t> values(32 * 8);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(i * 257 + 3);
  std::vector<unsigned> out(32 * 4);
  launch(load_kernel, 1, 32, 1, sizeof(MatrixStorage), seed, values.data(), transposed, barrier,
         out.data());
  bool right = true;
  for (unsigned lane = 0; lane < 32; ++lane) {
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
      // PTX ISA, ldmatrix: thread 4 r + i holds elements 2 i and 2 i + 1 of row r.
      const auto at = [&](unsigned row, unsigned column) {
        return transposed ? values[(matrix * 8 + column) * 8 + row]
                          : values[(matrix * 8 + row) * 8 + column];
      };
      const unsigned first = at(lane / 4, lane % 4 * 2), second = at(lane / 4, lane % 4 * 2 + 1);
      right = right && out[lane * 4 + matrix] == (first | second << 16);
    }
  }
  return right;
}

TEST(load_matrices) {
  for (int seed = 0; seed < kSchedules; ++seed) {
    CHECK(load(false, 1, uint64_t(seed)));
    CHECK(load(true, 1, uint64_t(seed)));
  }
}

TEST(loads_before_the_rows_are_written_are_caught) {
  if (!emulation::race_checker_active()) return;
  for (int seed = 0; seed < kSchedules; ++seed) {
    for (const bool transposed : {false, true}) {
      const std::string error = error_of([&] { load(transposed, 0, uint64_t(seed)); });
      CHECK(contains(error, "race") || contains(error, "nobody wrote"));
    }
  }
}

__global__ void unaligned_kernel(bool in_shared) {
  MatrixStorage& storage = cuda::shared_storage<MatrixStorage>();
  alignas(16) uint16_t own[8] = {};
  unsigned to[4];
  cuda::load_matrices(to, in_shared ? &storage.rows[0][1] : own);
}

TEST(wrong_rows_are_reported) {
  const auto error = [](bool in_shared) {
    return error_of(
        [&] { launch(unaligned_kernel, 1, 32, 1, sizeof(MatrixStorage), 0, in_shared); });
  };
  CHECK(contains(error(true), "not aligned"));
  CHECK(contains(error(false), "not in shared memory"));
}

// The coordinates of element `i` of a lane's fragments, as in the PTX ISA, "Matrix fragments for
// mma.m16n8k16 with floating point type".
struct Coordinates {
  int row, column;
};
Coordinates of_a(int lane, int i) {
  const bool upper = (i >= 0 && i < 2) || (i >= 4 && i < 6);
  return {upper ? lane >> 2 : (lane >> 2) + 8, lane % 4 * 2 + (i & 1) + (i >= 4 ? 8 : 0)};
}
Coordinates of_b(int lane, int i) { return {lane % 4 * 2 + (i & 1) + (i >= 2 ? 8 : 0), lane >> 2}; }
Coordinates of_sum(int lane, int i) {
  return {i < 2 ? lane >> 2 : (lane >> 2) + 8, lane % 4 * 2 + (i & 1)};
}

struct Fragments {
  unsigned a[4], b[2];
  float sum[4];
};

template <class T>
__global__ void multiply_kernel(Fragments* lanes) {
  Fragments& f = lanes[threadIdx.x];
  unsigned a[4], b[2];
  float sum[4];
  for (int i = 0; i < 4; ++i) a[i] = f.a[i];
  for (int i = 0; i < 2; ++i) b[i] = f.b[i];
  for (int i = 0; i < 4; ++i) sum[i] = f.sum[i];
  if constexpr (std::is_same_v<T, BFloat16>) {
    cuda::multiply_add_bf16(sum, a, b);
  } else {
    cuda::multiply_add_f16(sum, a, b);
  }
  for (int i = 0; i < 4; ++i) f.sum[i] = sum[i];
}

template <class T>
uint16_t bits_of_number(float value) {
  return std::is_same_v<T, BFloat16> ? emulation::bf16_of(value) : emulation::f16_of(value);
}

template <class T>
void check_product(uint64_t seed) {
  // Small integers: every sum is exact, whatever its order.
  float a[16][16], b[16][8], sum[16][8];
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) a[i][j] = static_cast<float>((i * 7 + j * 3) % 11 - 5);
    for (int j = 0; j < 8; ++j) b[i][j] = static_cast<float>((i * 5 + j * 13) % 9 - 4);
    for (int j = 0; j < 8; ++j) sum[i][j] = static_cast<float>(i - 2 * j);
  }
  std::vector<Fragments> lanes(32);
  for (int lane = 0; lane < 32; ++lane) {
    Fragments& f = lanes[static_cast<size_t>(lane)];
    f = {};
    for (int i = 0; i < 8; ++i) {
      const Coordinates at = of_a(lane, i);
      f.a[i / 2] |= unsigned(bits_of_number<T>(a[at.row][at.column])) << (i % 2 * 16);
    }
    for (int i = 0; i < 4; ++i) {
      const Coordinates at = of_b(lane, i);
      f.b[i / 2] |= unsigned(bits_of_number<T>(b[at.row][at.column])) << (i % 2 * 16);
    }
    for (int i = 0; i < 4; ++i) f.sum[i] = sum[of_sum(lane, i).row][of_sum(lane, i).column];
  }
  launch(multiply_kernel<T>, 1, 32, 1, 0, seed, lanes.data());
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const Coordinates at = of_sum(lane, i);
      float want = sum[at.row][at.column];
      for (int k = 0; k < 16; ++k) want += a[at.row][k] * b[k][at.column];
      CHECK_EQ(lanes[static_cast<size_t>(lane)].sum[i], want);
    }
  }
}

TEST(products) {
  for (int seed = 0; seed < kSchedules; ++seed) {
    check_product<BFloat16>(uint64_t(seed));
    check_product<Half>(uint64_t(seed));
  }
}

__global__ void half_a_warp_kernel() {
  if (threadIdx.x < 16) return;
  float sum[4] = {};
  const unsigned a[4] = {}, b[2] = {};
  cuda::multiply_add_f16(sum, a, b);
}

TEST(a_warp_that_is_not_whole_is_reported) {
  CHECK(contains(error_of([] { launch(half_a_warp_kernel, 1, 32, 1, 0, 0); }), "has exited"));
}

TEST(rounding_to_16_bits) {
  // Every number of 16 bits stays, and what lies between two goes to the nearer, or the even one.
  for (unsigned bits = 0; bits < 0x7c00u; ++bits) {
    const Half half = {static_cast<uint16_t>(bits)}, next = {static_cast<uint16_t>(bits + 1)};
    CHECK_EQ(emulation::f16_of(to_float(half)), bits);
    if (bits == 0x7bffu) break;
    const float middle = (to_float(half) + to_float(next)) / 2;  // exact
    CHECK_EQ(emulation::f16_of(middle), bits + bits % 2);
    CHECK_EQ(emulation::f16_of(std::nextafter(middle, 0.0f)), bits);
    CHECK_EQ(emulation::f16_of(-std::nextafter(middle, 1e9f)), 0x8000u | (bits + 1));
  }
  CHECK_EQ(emulation::f16_of(65519.0f), 0x7bffu);
  CHECK_EQ(emulation::f16_of(65520.0f), 0x7c00u);
  for (unsigned bits = 0; bits < 0x7f80u; bits += 13) {
    const float number = to_float(BFloat16{static_cast<uint16_t>(bits)});
    const float next = to_float(BFloat16{static_cast<uint16_t>(bits + 1)});
    CHECK_EQ(emulation::bf16_of(number), bits);
    const float middle = float_of(bits << 16 | 0x8000u);
    CHECK_EQ(emulation::bf16_of(middle), bits + bits % 2);
    CHECK(number < middle && middle < next);
  }
  CHECK_EQ(cuda::round_to_bf16(1.0f, -2.0f), 0xc0003f80u);
  CHECK_EQ(cuda::round_to_f16(1.0f, -2.0f), 0xc0003c00u);
  CHECK(std::isnan(to_float(Half{emulation::f16_of(std::nanf(""))})));
  CHECK(std::isnan(to_float(BFloat16{emulation::bf16_of(std::nanf(""))})));
}

}  // namespace
}  // namespace lmdecode

CHECK_MAIN()
