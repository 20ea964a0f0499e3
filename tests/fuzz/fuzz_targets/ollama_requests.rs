#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    baton_fuzz::requests::ollama(input);
});
