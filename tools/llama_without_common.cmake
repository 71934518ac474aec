# The binding never calls the code that llama.cpp's own command line programs share.
set(LLAMA_BUILD_COMMON OFF)
