// Products with dense and with packed weights as Python calls them.
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <stdexcept>
#include <string>

#include "bindings.h"
#include "cpu_addresses.h"
#include "cpu_linear.h"
#include "cpu_names.h"
#include "cpu_packed.h"

namespace nanovllm {
namespace {

void run_linear(const std::string& isa, const std::string& dtype, const Address& x, uintptr_t weight, uintptr_t bias,
                const Address& y, int64_t rows, int64_t in_features, int64_t out_features, bool interleaved,
                int threads) {
    const linear::Problem problem{pointer<const void>(x.first), pointer<const void>(weight), pointer<const void>(bias),
                                  pointer<void>(y.first), x.second, y.second, rows, in_features, out_features,
                                  interleaved};
    linear::run(problem, linear::kernel_of(isa_of(isa), dtype_of(dtype)), threads);
}

void interleave(const std::string& dtype, uintptr_t weight, int64_t out_features, int64_t in_features, bool back,
                int threads) {
    linear::interleave(dtype_of(dtype), pointer<void>(weight), out_features, in_features, back, threads);
}

// The indices come from a request, so they are checked here.
void gather(const std::string& dtype, uintptr_t weight, uintptr_t y, uintptr_t indices, int64_t count,
            int64_t in_features, int64_t out_features, bool interleaved, int threads) {
    const int64_t* const rows = pointer<const int64_t>(indices);
    for (int64_t i = 0; i < count; ++i)
        if (rows[i] < 0 || rows[i] >= out_features)
            throw std::out_of_range("Row " + std::to_string(rows[i]) + " is not one of " +
                                    std::to_string(out_features) + ".");
    const linear::Gather all{pointer<const void>(weight), pointer<void>(y), rows, count, in_features, out_features,
                             interleaved};
    linear::gather(dtype_of(dtype), all, threads);
}

// With small pages, every second row of weights costs a walk through the page tables.
void use_huge_pages(uintptr_t address, int64_t bytes) {
#if defined(__linux__)
    const auto page = uintptr_t(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = address / page * page, end = (address + uintptr_t(bytes) + page - 1) / page * page;
    (void)madvise(pointer<void>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)address, (void)bytes;
#endif
}

packed::Weight packed_weight(const std::string& scheme, uintptr_t data, uintptr_t scales,
                             const std::string& scale_dtype, uintptr_t zeros, int64_t outputs_per_scale,
                             int64_t group_size, int64_t in_features, int64_t out_features) {
    return {packed::scheme_of(scheme), pointer<const uint8_t>(data), pointer<const void>(scales), dtype_of(scale_dtype),
            pointer<const int8_t>(zeros), outputs_per_scale, group_size, in_features, out_features};
}

void run_packed(const std::string& isa, const std::string& dtype, const Address& x, const packed::Weight& weight,
                uintptr_t bias, const Address& y, int64_t rows, int threads) {
    const packed::Problem problem{weight, dtype_of(dtype), pointer<const void>(x.first), pointer<const void>(bias),
                                  pointer<void>(y.first), x.second, y.second, rows};
    packed::run(problem, packed::kernel_of(isa_of(isa)), threads);
}

}  // namespace

void bind_products(py::module_& module) {
    module.attr("INTERLEAVED_ROWS") = linear::kGroup;
    module.attr("INTERLEAVED_INPUTS") = linear::kInterleavedInputs;
    module.def("linear", &run_linear, py::kw_only(), "isa"_a, "dtype"_a, "x"_a, "weight"_a, "bias"_a, "y"_a, "rows"_a,
               "in_features"_a, "out_features"_a, "interleaved"_a, "threads"_a, WithoutGil(), "y = x W^T + bias.");
    module.def("interleave", &interleave, py::kw_only(), "dtype"_a, "weight"_a, "out_features"_a, "in_features"_a,
               "back"_a, "threads"_a, WithoutGil(), "Reorder a weight in place for `interleaved=True`, or back.");
    module.def("gather", &gather, py::kw_only(), "dtype"_a, "weight"_a, "y"_a, "indices"_a, "count"_a, "in_features"_a,
               "out_features"_a, "interleaved"_a, "threads"_a, WithoutGil(),
               "Copy rows of a dense weight to y. Raises IndexError for an index outside of it.");
    module.def("use_huge_pages", &use_huge_pages, "address"_a, "bytes"_a,
               "Ask for huge pages behind all pages of this memory. Where the system has none, nothing changes.");

    py::class_<packed::Weight>(module, "PackedWeight", "A weight in panels, valid while its tensors live.")
        .def(py::init(&packed_weight), py::kw_only(), "scheme"_a, "data"_a, "scales"_a, "scale_dtype"_a, "zeros"_a,
             "outputs_per_scale"_a, "group_size"_a, "in_features"_a, "out_features"_a);
    module.def("packed_linear", &run_packed, py::kw_only(), "isa"_a, "dtype"_a, "x"_a, "weight"_a, "bias"_a, "y"_a,
               "rows"_a, "threads"_a, WithoutGil(), "y = x W^T + bias with a packed weight.");
}

}  // namespace nanovllm
