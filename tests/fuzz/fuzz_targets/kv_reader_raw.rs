#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    baton_fuzz::bodies::kv_reader_raw(input);
});
