// Trains GPT-2, Llama 3 and Qwen2.5 on a GPU. The model is llmc/model.cuh, the loop llmc/trainer.h, all options --help.
//   make train_gpt2cu && ./train_gpt2cu -i "data/*_train_*.bin" -j "data/*_val_*.bin" -e gpt2:124M -b 64 -d 524288 -o out
#include "llmc/decode.cuh"

#ifndef TESTING  // test_gpt2.cu includes this file: what is tested is what ships
#include "llmc/trainer.h"

int main(int argc, char **argv) { return trainer_main(argc, argv); }
#endif
