// A program whose race lies where it is easily overlooked, or that has none: reach CASE.
//   larger      reads a result by the buffer's get into more than a download in flight writes
//   moved       the same while a buffer comes, so that what is known of the memory changes
//   other       reads a result of one device after a buffer of another was freed
//   own         frees a buffer that the device still uses
//   wide        loads a vector that begins below a download in flight and reaches into it
//   below       writes up to the first byte of a download in flight
//   given-back  frees its own memory while a download to it is in flight
//   in-place    has the device compute on its source's bytes, as ggml.h offers
//   adam        takes a step of AdamW, and another stream then reads a moment
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

static const int N = 1 << 18;
static ggml_context * context() { return ggml_init({ 1 << 20, nullptr, true }); }
static ggml_tensor * tensor(ggml_context * c, const char * name, int n = N) { return ggml_set_name(ggml_new_tensor_1d(c, GGML_TYPE_F32, n), name); }
static void compute(ggml_backend_t b, ggml_context * c, ggml_tensor * t) {
    ggml_cgraph * g = ggml_new_graph(c);
    ggml_build_forward_expand(g, t);
    ggml_backend_graph_compute_async(b, g);
}

int main(int, char ** argv) {
    std::string what = argv[1];
    ggml_backend_dev_t devices[2] = { ggml_backend_dev_by_name("sim0"), ggml_backend_dev_by_name("sim1") };
    if (!devices[1]) return 2;
    ggml_backend_t other = ggml_backend_dev_init(devices[0], nullptr);
    ggml_backend_t b = ggml_backend_dev_init(devices[what == "other"], nullptr);
    std::vector<float> twos(N, 2), got(2 * N, 0);

    ggml_context * c = context();
    ggml_tensor * x = tensor(c, "x"), * z = tensor(c, "z"), * m = tensor(c, "m"), * v = tensor(c, "v"), * settings = tensor(c, "settings", 7);
    ggml_set_param(x);
    ggml_tensor * y = what == "in-place" ? ggml_norm_inplace(c, x, 1e-5f) : what == "adam" ? ggml_opt_step_adamw(c, x, z, m, v, settings) : ggml_sqr(c, x);
    ggml_tensor * read = ggml_sqr(c, m);
    ggml_set_name(y, "y");
    ggml_set_name(read, "read");
    ggml_backend_buffer_t memory = ggml_backend_alloc_ctx_tensors(c, b);
    for (auto * t : { x, z, m, v, settings }) ggml_backend_tensor_set(t, twos.data(), 0, ggml_nbytes(t));
    ggml_context * rest = context();
    ggml_tensor * w = tensor(rest, "w");
    ggml_backend_buffer_t unused = what == "other" || what == "adam" ? ggml_backend_alloc_ctx_tensors(rest, other) : nullptr;
    compute(b, c, y); // from here on touches are seen
    ggml_backend_synchronize(b);
    compute(b, c, y);

    if (what == "larger" || what == "moved") {
        ggml_backend_tensor_get_async(b, y, got.data(), 0, N * sizeof(float) / 2);
        if (what == "moved") {
            unused = ggml_backend_alloc_ctx_tensors(rest, b);
            ggml_backend_tensor_copy_async(b, b, z, w);
        }
        ggml_backend_tensor_get(z, got.data(), 0, N * sizeof(float));
    }
    if (what == "other") {
        ggml_backend_buffer_free(unused);
        unused = nullptr;
        ggml_backend_tensor_get(y, got.data(), 0, 4);
    }
    if (what == "own") ggml_backend_buffer_free(memory);
    if (what == "wide" || what == "below") {
        ggml_backend_buffer_type_t type = ggml_backend_dev_host_buffer_type(devices[0]);
        if (!type) return 2;
        float * pinned = (float *) ggml_backend_buffer_get_base(ggml_backend_buft_alloc_buffer(type, 4096));
        memset(pinned, 0, 4096);
        ggml_backend_tensor_get_async(b, y, pinned + 6, 0, 4);
#ifdef __SSE__
        if (what == "wide") _mm_storeu_ps(got.data(), _mm_loadu_ps(pinned + 4));
#else
        if (what == "wide") got[2] = *(volatile float *) (pinned + 6);
#endif
        if (what == "below") *(volatile float *) (pinned + 5) = 1, *(volatile char *) ((char *) pinned + 23) = 1, *(volatile double *) (pinned + 4) = 1;
    }
    if (what == "given-back") {
        float * own = new float[N];
        ggml_backend_tensor_get_async(b, y, own, 0, N * sizeof(float));
        delete[] own;
    }
    if (what == "adam") compute(other, c, read);
    ggml_backend_synchronize(b);
    ggml_backend_synchronize(other);
    printf("%g %g\n", got[0], got[2]);
    if (unused) ggml_backend_buffer_free(unused);
    if (what != "own") ggml_backend_buffer_free(memory);
    ggml_backend_free(b);
    ggml_backend_free(other);
    return 0;
}
