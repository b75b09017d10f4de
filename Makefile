# llm.cu: `make demo` and `make test` are all that a fresh machine needs; `make` lists the rest.
#
#   make train_gpt2cu PRECISION=FP32             fp32 instead of bf16
#   make train_gpt2cu ARCHS="80 89 90a 100"      a binary for several GPU generations (default: this machine's GPUs)
#   make -B train_gpt2 PLAIN=1                   products in three loops instead of vectors, to the same digits
#   CUDA_HOME=/opt/cuda-12.8 make train_gpt2cu   a certain toolkit
#   PYTHON=/usr/bin/python3.12 make demo         a certain Python, to make .venv with
#
# llmc/doctor.py finds compiler, MPI, CUDA, cuBLAS and NCCL and writes build/config.mk; everything is rebuilt when its findings change.
# Every product is written under another name and renamed when it is whole: stop make at any moment and call it again.

PYTHON ?= python3
PRECISION ?= BF16
BUILD := build
CONFIG := $(BUILD)/config.mk
VENV_PYTHON := .venv/bin/python

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SECONDARY:
.SUFFIXES:
SHELL := /bin/sh
comma := ,
space := $(subst ,, )

ifneq ($(filter-out help clean,$(MAKECMDGOALS)),)
  DETECTED := $(shell $(PYTHON) -m llmc.doctor --make $(CONFIG) >&2 && echo ok)
  ifneq ($(DETECTED),ok)
    $(error llmc/doctor.py did not run. Python 3.10 or newer is needed: make PYTHON=/path/to/python3)
  endif
  include $(CONFIG)
endif

ifeq ($(filter BF16 FP32,$(PRECISION)),)
  $(error PRECISION=$(PRECISION) is not known: use BF16 or FP32)
endif
ARCHS ?= $(MACHINE_ARCHS)
ARCHS := $(strip $(ARCHS))

# A program uses a part of each header: what it leaves out is no mistake (-Wno-unused-function).
# Contraction and reassociation stay as the compiler's defaults; -ffast-math would break the NaN checks.
REVISION_FLAGS := -DGIT_REVISION=git_revision -include $(BUILD)/revision.h
OPTIMISE := -O3 $(HOST_FLAGS) -fno-math-errno -fno-trapping-math
CFLAGS := -std=gnu11 $(OPTIMISE) -Wall -Wextra -Wno-unused-function -pthread $(if $(PLAIN),-DLLMC_PLAIN=1)
WARNINGS := -Wall -Wextra -Werror -Wno-unused-function $(or $(OPENMP),-Wno-unknown-pragmas)
TEST_CFLAGS := -std=gnu11 $(OPTIMISE) -O2 $(WARNINGS) -pthread -I.
# Without MPI: one rank; without NCCL: one GPU. The programs say so when they are started as more.
RANKS := $(if $(MPI_LIBS),-DUSE_MPI $(MPI_CFLAGS))
GPU_RANKS := $(RANKS) $(if $(and $(MPI_LIBS),$(NCCL_LIBS)),-DUSE_NCCL $(NCCL_CFLAGS))
ASAN_CFLAGS := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer

# One build folder for each precision and list of architectures, so that switching between them rebuilds nothing; and one for
# QUICK=1, hardly optimised objects which tests compile where no GPU can run them: no program for users comes of these.
QUICK :=
CU := $(BUILD)/$(if $(QUICK),quick-)$(if $(filter FP32,$(PRECISION)),fp32,bf16)-$(subst $(space),-,$(ARCHS))
PTX := $(lastword $(filter-out %a,$(ARCHS)))
GENCODE := $(foreach a,$(ARCHS),-gencode arch=compute_$a,code=sm_$a) $(if $(PTX),-gencode arch=compute_$(PTX)$(comma)code=compute_$(PTX))
# ptxas compiles kernels beside each other where it can: the same machine code. OpenMP: for a large model's random weights.
# QUICK: ptxas -O1 does not end on products of wgmma whose loops cicc -O1 did not unroll; the host's code would take as long as
# the GPU's if it were optimised.
SPLIT := $(if $(QUICK),-Xcicc -O1 -Xptxas -O2,$(if $(NVCC),$(if $(findstring --split-compile,$(shell $(NVCC) --help)),-Xptxas -split-compile=0)))
NVFLAGS := -std=c++17 $(if $(QUICK),-O0,-O3) --threads 0 $(SPLIT) $(if $(OPENMP),-Xcompiler $(OPENMP)) $(GENCODE) $(if $(filter FP32,$(PRECISION)),-DPRECISION_FP32) -I. $(CUDA_CFLAGS)

RANKED := dev/cuda/p2p.cu dev/cuda/tp.cu dev/cuda/decode.cu
nvflags = $(NVFLAGS) $(if $(filter-out $(RANKED),$(filter dev/cuda/%,$<)),,$(GPU_RANKS)) $(REVISION_FLAGS)
LADDERS := $(patsubst dev/cuda/%.cu,%,$(wildcard dev/cuda/*.cu))
HOST_TESTS := $(patsubst dev/test/%.c,%,$(wildcard dev/test/test_*.c))
C_HEADERS := $(wildcard llmc/*.h llmc/*/*.h)
HEADERS := $(C_HEADERS) $(wildcard llmc/*/*.cuh)

# An unfinished dependency file would stop every later make, so it is renamed before its object. Makes may run beside each other: each has its own partial files.
PARTIAL := $(shell echo $$PPID).partial
keep = mv -f $@.d.$(PARTIAL) $@.d && mv -f $@.$(PARTIAL) $@
depend = -MMD -MP -MT $@ -MF $@.d.$(PARTIAL)
renew = cmp -s $1 $@ || { cp $1 $@.$(PARTIAL) && mv -f $@.$(PARTIAL) $@; }

.PHONY: help all demo test test-all doctor headers ladders bench sanitize fuzz parity format venv toolkit mpi clean FORCE \
        train_gpt2 train_gpt2cu train_gpt2fp32cu test_gpt2cu host_tests
FORCE:

help:
	@echo 'make demo          train a small GPT-2 on this machine, about two minutes'
	@echo 'make test          what a day'\''s work can break;  make test-all: every test that this machine can run'
	@echo 'make doctor        what was found here, what is off, and how to turn it on'
	@echo 'make train_gpt2    the CPU trainer'
	@echo 'make train_gpt2cu  the GPU trainer (PRECISION=BF16|FP32, ARCHS="80 89 90a 100")'
	@echo 'make test_gpt2cu   whole-model tests on a GPU'
	@echo 'make bench         one table: each kernel beside what this GPU gives and the vendor'\''s (ONLY=attention OUTPUT=kernels.md)'
	@echo 'make parity        C, CUDA and PyTorch train the same steps; their loss curves in one picture'
	@echo 'make sanitize      host tests under ASan and UBSan; compute-sanitizer on a GPU'
	@echo 'make fuzz          broken files for every reader, with clang (ONLY="json config" SECONDS=600)'
	@echo 'make headers       each header compiles alone'
	@echo 'make format        C, CUDA and Python in the layout of .clang-format and ruff.toml'
	@echo 'make venv          .venv with everything the Python tools use;  make toolkit: CUDA and NCCL into .toolkit, MPI into .venv'
	@echo 'make clean         removes build products, keeps .venv, data and logs'

all: train_gpt2 $(if $(NVCC),train_gpt2cu test_gpt2cu)

# ---- the trainers

$(BUILD)/revision.h:
	@mkdir -p $(@D)
	@p=$@.$(PARTIAL); printf '#ifdef __cplusplus\nextern "C"\n#else\nextern\n#endif\nconst char git_revision[];\n' > $$p && mv -f $$p $@
# Only this file knows the revision: a commit relinks, it does not recompile.
$(BUILD)/revision.c: FORCE
	@mkdir -p $(@D)
	@p=$@.$(PARTIAL); printf 'const char git_revision[] = "%s";\n' "$$(git describe --always --dirty 2>/dev/null || echo unknown)" > $$p; \
	if cmp -s $$p $@; then rm $$p; else mv -f $$p $@; fi
$(BUILD)/revision.o: $(BUILD)/revision.c $(BUILD)/revision.h
	@p=$@.$(PARTIAL); $(CC) -c -include $(BUILD)/revision.h $< -o $$p && mv -f $$p $@

$(BUILD)/train_gpt2.o: train_gpt2.c $(BUILD)/revision.h $(CONFIG) Makefile
	$(if $(CC),,@echo 'error: no C compiler; run make doctor' >&2; exit 1;)
	$(CC) $(CFLAGS) $(RANKS) $(REVISION_FLAGS) $(depend) -c $< -o $@.$(PARTIAL)
	@$(keep)
$(BUILD)/train_gpt2: $(BUILD)/train_gpt2.o $(BUILD)/revision.o
	$(CC) $(CFLAGS) $^ -o $@.$(PARTIAL) -lm -ldl $(MPI_LIBS) && mv -f $@.$(PARTIAL) $@
train_gpt2: $(BUILD)/train_gpt2
	@$(call renew,$<)
# The same program with every access checked, for the tests of bad input; without MPI, whose own leaks are not ours.
$(BUILD)/train_gpt2.asan: train_gpt2.c $(BUILD)/revision.o $(CONFIG) Makefile
	$(CC) $(CFLAGS) $(ASAN_CFLAGS) $(REVISION_FLAGS) $(depend) $< $(BUILD)/revision.o -o $@.$(PARTIAL) -lm -ldl
	@$(keep)

need_cuda = $(if $(NVCC),,@printf 'error: no CUDA toolkit: %s\n  hint: make doctor shows what is missing; make toolkit puts one into .toolkit\n' '$(CUDA_OFF)' >&2; exit 1;)
# Where ptxas serialises wgmma (C7510, C7512, ...) it says so and goes on, to a program slower than any that was measured.
# Ladders have shapes that lose, and what is hardly optimised (QUICK) is not to be fast.
said = $@.said.$(PARTIAL)
watched = $(if $(filter dev/cuda/%,$<)$(findstring -Xcicc,$(SPLIT)),,$(said))
not_serialised = cat $(said) >&2; slow=$$(grep -c 'wgmma.*serialized' $(watched) < /dev/null); rm -f $(said); [ $$slow = 0 ] || { \
	rm -f $@.$(PARTIAL) $@.d.$(PARTIAL); \
	printf 'error: ptxas of %s serialises wgmma in $<, see above: the program would be slower than it should be\n' '$(NVCC)' >&2; \
	printf '  hint: take another toolkit, such as that of make toolkit: CUDA_HOME=.toolkit/nvidia/cu13 make ...\n' >&2; exit 1; }
$(CU)/%.o: %.cu $(BUILD)/revision.h $(CONFIG) Makefile
	$(need_cuda)
	@mkdir -p $(@D)
	$(NVCC) $(nvflags) $(depend) -c $< -o $@.$(PARTIAL) 2> $(said) || { cat $(said) >&2; rm -f $(said); exit 1; }
	@$(not_serialised)
	@$(keep)
# Tests where no GPU can run them: as far as PTX only and not optimised (-G), a tenth of the time.
$(CU)/%.ptx: %.cu $(BUILD)/revision.h $(CONFIG) Makefile
	$(need_cuda)
	@mkdir -p $(@D)
	$(NVCC) $(subst code=sm_,code=compute_,$(subst $(SPLIT),,$(nvflags))) $(depend) -G --ptx $< -o $@.$(PARTIAL)
	@$(keep)
# What takes long to compile is an object that trainer, tests and ladders share.
MATMUL_OBJECTS := $(patsubst %,$(CU)/llmc/kernels/matmul_hopper_%.o,forward backward fp8)
$(addprefix $(CU)/,train_gpt2cu test_gpt2cu $(addprefix dev/cuda/,experts lora matmul matmul_fp8 muon qk_norm rope tp)): $(MATMUL_OBJECTS)
$(addprefix $(CU)/,train_gpt2cu test_gpt2cu): $(patsubst %,$(CU)/llmc/%.o,kernels/attention kernels/attention_rows kernels/decode_experts kernels/matmul_rows kernels/norm model/decode)
$(addprefix $(CU)/dev/cuda/,experts matmul_rows): $(CU)/llmc/kernels/matmul_rows.o
$(addprefix $(CU)/dev/cuda/,experts decode_experts): $(CU)/llmc/kernels/decode_experts.o
$(CU)/dev/cuda/attention_rows: $(CU)/llmc/kernels/attention_rows.o
$(CU)/train_gpt2cu $(CU)/test_gpt2cu: $(CU)/%cu: $(CU)/%.o $(BUILD)/revision.o
	$(NVCC) $(NVFLAGS) $^ -o $@.$(PARTIAL) $(CUDA_LIBS) $(MPI_LIBS) $(if $(MPI_LIBS),$(NCCL_LIBS)) && mv -f $@.$(PARTIAL) $@
# All objects at once, under a plain make, too. fp32 has a name of its own, to have both.
at_once = --no-print-directory $(if $(findstring jobserver,$(MAKEFLAGS)),,-j7)
not_quick = $(if $(QUICK),@printf 'error: QUICK=1 is for tests that only compile\n  hint: leave it out\n' >&2; exit 1;)
train_gpt2cu test_gpt2cu: FORCE
	$(not_quick)
	@$(MAKE) $(at_once) $(CU)/$@
	@$(call renew,$(CU)/$@)
FP32 := $(BUILD)/fp32-$(subst $(space),-,$(ARCHS))/train_gpt2cu
train_gpt2fp32cu: FORCE
	$(not_quick)
	@$(MAKE) $(at_once) PRECISION=FP32 $(FP32)
	@$(call renew,$(FP32))

# ---- kernel ladders, host tests, headers

ladders: $(LADDERS:%=$(CU)/dev/cuda/%)
$(CU)/dev/cuda/%: $(CU)/dev/cuda/%.o $(BUILD)/revision.o
	$(NVCC) $(NVFLAGS) $^ -o $@.$(PARTIAL) $(CUDA_LIBS) $(if $(filter $(RANKED),dev/cuda/$*.cu),$(MPI_LIBS) $(if $(MPI_LIBS),$(NCCL_LIBS))) && mv -f $@.$(PARTIAL) $@

host_tests: $(HOST_TESTS:%=$(BUILD)/test/%) $(HOST_TESTS:%=$(BUILD)/test/%.asan)
$(BUILD)/test/%.o: dev/test/%.c $(CONFIG) Makefile
	@mkdir -p $(@D)
	$(CC) $(TEST_CFLAGS) $(depend) -c $< -o $@.$(PARTIAL)
	@$(keep)
$(BUILD)/test/%.asan.o: dev/test/%.c $(CONFIG) Makefile
	@mkdir -p $(@D)
	$(CC) $(TEST_CFLAGS) $(ASAN_CFLAGS) $(depend) -c $< -o $@.$(PARTIAL)
	@$(keep)
$(BUILD)/test/%.asan: $(BUILD)/test/%.asan.o
	$(CC) $(TEST_CFLAGS) $(ASAN_CFLAGS) $< -o $@.$(PARTIAL) -lm && mv -f $@.$(PARTIAL) $@
$(BUILD)/test/%.mpi: dev/test/%.c $(CONFIG) Makefile
	@mkdir -p $(@D)
	$(if $(MPI_LIBS),,@printf 'error: no MPI\n  hint: make doctor says how to turn it on\n' >&2; exit 1;)
	$(CC) $(TEST_CFLAGS) $(RANKS) $(depend) $< -o $@.$(PARTIAL) -lm $(MPI_LIBS)
	@$(keep)
$(BUILD)/test/%: $(BUILD)/test/%.o
	$(CC) $(TEST_CFLAGS) $< -o $@.$(PARTIAL) -lm && mv -f $@.$(PARTIAL) $@

# Readers of bytes from outside, each with its seeds (dev/fuzz/fuzz.h); the linker hands their calls of these to it.
FUZZ_TARGETS := $(patsubst dev/fuzz/%.c,%,$(wildcard dev/fuzz/*.c))
FUZZ_WRAPPED := malloc calloc realloc posix_memalign free strdup open close fopen fclose exit pthread_create
FUZZ_FLAGS = -std=gnu11 -Wall -Wextra -Werror -Wno-unused-function -Wno-unknown-pragmas $(ASAN_CFLAGS) $(FUZZ_WRAPPED:%=-Wl,--wrap=%) \
	$< -lm -pthread
CLANG ?= clang
SECONDS ?= 60
$(BUILD)/fuzz/%.replay: dev/fuzz/%.c $(CONFIG) Makefile
	@mkdir -p $(@D)
	$(CC) -DFUZZ_REPLAY $(FUZZ_FLAGS) $(depend) -o $@.$(PARTIAL)
	@$(keep)
$(BUILD)/fuzz/%.fuzzer: dev/fuzz/%.c $(CONFIG) Makefile
	@mkdir -p $(@D)
	$(CLANG) -fsanitize=fuzzer $(FUZZ_FLAGS) $(depend) -o $@.$(PARTIAL) && $(keep) || { \
	printf 'error: $@ was not built\n  hint: it needs clang with libFuzzer: apt install clang libclang-rt-dev, or CLANG=...\n' >&2; \
	exit 1; }

# A header is included by a file that has nothing else. C headers serve C and C++; device code is compiled for one GPU only,
# and not optimised (-G), which would take six times as long.
headers: $(HEADERS:llmc/%=$(BUILD)/headers/%.ok)
$(BUILD)/headers/%.h.ok: llmc/%.h $(CONFIG) Makefile
	@mkdir -p $(@D)
	@printf '#include "llmc/$*.h"\n' > $(@:.ok=.c)
	@$(CC) -std=gnu11 $(WARNINGS) -I. $(depend) -fsyntax-only $(@:.ok=.c)
	@$(if $(CXX),$(CXX) -x c++ -std=c++17 $(WARNINGS) -I. $(depend).cxx -fsyntax-only $(@:.ok=.c) && cat $@.d.$(PARTIAL).cxx >> $@.d.$(PARTIAL) && rm $@.d.$(PARTIAL).cxx)
	@touch $@.$(PARTIAL) && $(keep) && echo 'ok llmc/$*.h'
$(BUILD)/headers/%.cuh.ok: llmc/%.cuh $(CONFIG) Makefile
	$(need_cuda)
	@mkdir -p $(@D)
	@printf '#include "llmc/$*.cuh"\nint main() {}\n' > $(@:.ok=.cu)
	@$(NVCC) -std=c++17 -I. $(CUDA_CFLAGS) -gencode arch=compute_90a,code=compute_90a $(depend) --ptx -G $(@:.ok=.cu) -o $@.$(PARTIAL)
	@$(keep) && echo 'ok llmc/$*.cuh'

# ---- what people call

demo:
	@$(PYTHON) -m llmc.venv demo
	@$(MAKE) --no-print-directory $(if $(and $(NVCC),$(filter-out 0,$(GPUS))),train_gpt2cu,train_gpt2)
	@$(VENV_PYTHON) -m llmc.demo ./$(if $(and $(NVCC),$(filter-out 0,$(GPUS))),train_gpt2cu,train_gpt2)

# A toolkit is fetched where there is a GPU; to compile the GPU programs elsewhere: make toolkit, then make test-all.
test test-all:
	@$(PYTHON) -m llmc.venv test
	@$(if $(NVCC),,$(if $(filter-out 0,$(GPUS)),$(PYTHON) -m llmc.venv toolkit || true))
	@$(if $(MPI_LIBS),,$(PYTHON) -m llmc.venv mpi || true)
	@$(VENV_PYTHON) dev/test/run_tests.py $(if $(filter test-all,$@),--all)

doctor:
	@$(PYTHON) -m llmc.doctor
venv:
	@$(PYTHON) -m llmc.venv test
toolkit mpi:
	@$(PYTHON) -m llmc.venv $@

format: venv
	@$(VENV_PYTHON) dev/tools/format.py

parity: venv train_gpt2 $(if $(and $(NVCC),$(filter-out 0,$(GPUS))),train_gpt2cu train_gpt2fp32cu)
	@$(VENV_PYTHON) dev/test/parity.py

need_gpu = $(if $(filter-out 0,$(GPUS)),,@printf 'error: $@ needs a GPU and there is none here\n  hint: make doctor says what was looked for\n' >&2; exit 1;)
bench:
	$(need_gpu)
	@$(MAKE) --no-print-directory ladders
	@$(if $(wildcard $(VENV_PYTHON)),$(VENV_PYTHON),$(PYTHON)) dev/bench/kernels.py --build $(CU) $(if $(ONLY),--only $(ONLY)) $(if $(OUTPUT),--output $(OUTPUT))

sanitize: venv
	@$(VENV_PYTHON) dev/test/run_tests.py --only asan
ifneq ($(filter-out 0,$(GPUS)),)
	$(if $(SANITIZER),,@printf 'error: no compute-sanitizer\n  hint: use a full CUDA toolkit: CUDA_HOME=... make sanitize\n' >&2; exit 1;)
	@$(MAKE) --no-print-directory test_gpt2cu
	@$(VENV_PYTHON) dev/test/sanitize.py $(SANITIZER) ./test_gpt2cu $(BUILD)/sanitize
else
	@echo 'no GPU here: compute-sanitizer was not run'
endif

fuzz: $(foreach t,$(or $(ONLY),$(FUZZ_TARGETS)),$(BUILD)/fuzz/$t.fuzzer $(BUILD)/fuzz/$t.replay)
	@$(PYTHON) dev/fuzz/fuzz.py --build $(BUILD)/fuzz --seconds $(SECONDS) $(or $(ONLY),$(FUZZ_TARGETS))

clean:
	rm -rf $(BUILD) train_gpt2 train_gpt2cu train_gpt2fp32cu test_gpt2cu

-include $(wildcard $(BUILD)/*.d $(BUILD)/test/*.d $(BUILD)/headers/*.d $(BUILD)/headers/*/*.d $(BUILD)/fuzz/*.d $(CU)/*.d $(CU)/llmc/*/*.d $(CU)/llmc/*.d $(CU)/dev/cuda/*.d)
