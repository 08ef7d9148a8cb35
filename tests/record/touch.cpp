// A program that touches pinned memory while a copy is in flight, or does not: touch CASE.
//   clean      waits before it touches
//   write      writes the source of a copy to the device before it is known to be done
//   read       reads the destination of a copy from the device before it is known to be done
//   neighbour  writes beside a source in flight, on the same page
//   get        reads a result by the buffer's get, which waits for no stream
//   pageable   reads a destination in its own memory before it waits (in flight under some contracts)
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

extern "C" __attribute__((noinline)) float the_culprit(volatile float * p, bool write) {
    if (write) *p = 5;
    return *p;
}

int main(int, char ** argv) {
    std::string what = argv[1];
    ggml_backend_dev_t device = ggml_backend_dev_by_name("sim0");
    if (!device) return 2;
    ggml_backend_t backend = ggml_backend_dev_init(device, nullptr);
    ggml_backend_buffer_type_t host_type = ggml_backend_dev_host_buffer_type(device);
    ggml_backend_buffer_t host = host_type ? ggml_backend_buft_alloc_buffer(host_type, 8192) : nullptr;
    std::vector<float> own(16384, 1.0f);
    float * in = host ? (float *) ggml_backend_buffer_get_base(host) : own.data(), * out = what == "pageable" ? own.data() + 2048 : in + 256;

    ggml_init_params params = { 1 << 20, nullptr, true };
    ggml_context * context = ggml_init(params);
    const int n = what == "pageable" ? 8192 : 128;
    ggml_tensor * x = ggml_new_tensor_1d(context, GGML_TYPE_F32, n);
    ggml_tensor * y = ggml_scale(context, x, 2.0f);
    ggml_set_name(x, "x");
    ggml_set_name(y, "y");
    ggml_cgraph * graph = ggml_new_graph(context);
    ggml_build_forward_expand(graph, y);
    ggml_backend_buffer_t memory = ggml_backend_alloc_ctx_tensors(context, backend);

    auto feed = [&](float value) {
        for (int i = 0; i < 128; i++) in[i] = value;
        ggml_backend_tensor_set_async(backend, x, in, 0, 128 * sizeof(float));
    };
    feed(1);
    ggml_backend_graph_compute_async(backend, graph); // from here on touches are seen
    ggml_backend_synchronize(backend);
    feed(2);
    if (what == "clean") ggml_backend_synchronize(backend);
    if (what == "write" || what == "clean") the_culprit(in + 3, true);
    if (what == "neighbour") the_culprit(in + 200, true);
    ggml_backend_graph_compute_async(backend, graph);
    if (what == "get") {
        float z[128];
        ggml_backend_tensor_get(y, z, 0, sizeof z);
    }
    ggml_backend_tensor_get_async(backend, y, out, 0, n * sizeof(float));
    float seen = what == "read" || what == "pageable" ? the_culprit(out + n / 2, false) : 0;
    ggml_backend_synchronize(backend);
    printf("%g %g %g\n", out[0], out[3], seen);
    ggml_backend_buffer_free(memory);
    if (host) ggml_backend_buffer_free(host);
    ggml_backend_free(backend);
    ggml_free(context);
    return 0;
}
