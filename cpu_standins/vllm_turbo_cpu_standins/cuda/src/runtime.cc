// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// CUDA's runtime, as far as the kernels' host code uses it, and matrix
// products.
#include "cuda_runtime.h"

#include "cuda_fp16.h"

namespace {

// The multiprocessors of the emulated GPU. They are few, because each block of
// a launch takes time.
constexpr int kNumProcessors = 4;
constexpr int kMajor = 9;
constexpr unsigned kMaxBlockThreads = 1024;

std::string last_error;

}  // namespace

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    default:
      return "an error that is not emulated";
  }
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? last_error.c_str()
                                         : "see the emulator's runtime.cc";
}

cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value =
      attribute == cudaDevAttrMultiProcessorCount ? kNumProcessors : kMajor;
  return cudaSuccess;
}

namespace emulator {

cudaError_t launch(const cudaLaunchConfig_t& config, Launch launch) {
  launch.grid = config.gridDim;
  launch.block = config.blockDim;
  launch.shared_bytes = config.dynamicSmemBytes;
  launch.overlaps = config.numAttrs > 0;
  const dim3 &grid = launch.grid, &block = launch.block;
  const unsigned threads = block.x * block.y * block.z;
  if (threads == 0 || threads > kMaxBlockThreads ||
      grid.x * grid.y * grid.z == 0 || grid.y > 65535 || grid.z > 65535)
    return cudaErrorInvalidConfiguration;
  last_error = run(launch);
  return last_error.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

namespace ptx {

// Lane 4 * g + t has rows g and g + 8 of the result, in columns 2 * t and the
// next. It has rows g and g + 8 of A, and column g of B.
//
// Along the inner axis a word has kWidth numbers. A lane has the t-th word of
// each half of the axis.
template <typename T, int kWidth, typename Number, typename Sum>
static void multiply(void* const (&lanes)[kWarpSize], Number number) {
  constexpr int kInner = 8 * kWidth;
  Sum a[16][kInner], b[kInner][8];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const auto& own = *static_cast<const Product<T>*>(lanes[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < kWidth; ++i) {
        const int k = half * kInner / 2 + kWidth * t + i;
        a[g][k] = number(own.a[2 * half], i);
        a[g + 8][k] = number(own.a[2 * half + 1], i);
        b[k][g] = number(own.b[half], i);
      }
    }
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    auto& own = *static_cast<Product<T>*>(lanes[lane]);
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      Sum sum = own.d[i];
      for (int k = 0; k < kInner; ++k) sum += a[row][k] * b[k][column];
      own.d[i] = static_cast<T>(sum);
    }
  }
}

void multiply_s8(void* const (&lanes)[kWarpSize]) {
  const auto number = [](uint32_t word, int i) -> int64_t {
    return static_cast<int8_t>(word >> (8 * i) & 0xFFu);
  };
  multiply<int, 4, decltype(number), int64_t>(lanes, number);
}

// Sums in double, rounded once.
void multiply_f16(void* const (&lanes)[kWarpSize]) {
  const auto number = [](uint32_t word, int i) -> double {
    return half_to_float(static_cast<uint16_t>(word >> (16 * i)));
  };
  multiply<float, 2, decltype(number), double>(lanes, number);
}

void multiply_bf16(void* const (&lanes)[kWarpSize]) {
  const auto number = [](uint32_t word, int i) -> double {
    return std::bit_cast<float>(word >> (16 * i) << 16);
  };
  multiply<float, 2, decltype(number), double>(lanes, number);
}

// Transpose an 8 x 8 matrix of 16-bit numbers, of which four lanes have a row.
void transpose(void* const (&lanes)[kWarpSize]) {
  uint16_t matrix[8][8];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const uint32_t word = *static_cast<const uint32_t*>(lanes[lane]);
    matrix[lane / 4][lane % 4 * 2] = static_cast<uint16_t>(word);
    matrix[lane / 4][lane % 4 * 2 + 1] = static_cast<uint16_t>(word >> 16);
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const int row = lane / 4, column = lane % 4 * 2;
    *static_cast<uint32_t*>(lanes[lane]) =
        uint32_t(matrix[column + 1][row]) << 16 | matrix[column][row];
  }
}

}  // namespace ptx
}  // namespace emulator
