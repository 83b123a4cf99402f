//! Any bytes decode to a value or to an error. A decoded value encodes to the same bytes again:
//! each value has exactly one encoding.
//!
//! ```text
//! make fuzz
//! ```
//!
//! The checks of heads and greetings are set right before decoding: a fuzzer cannot guess a CRC,
//! and everything behind it would go untested.

#![no_main]

use hecaton_transport::codec::{
    AnswerTables, HEAD_BYTES, HELLO_BYTES, Head, RequestTables, WELCOME_BYTES, decode_answer,
    decode_hello, decode_request, decode_welcome, encode_answer, encode_hello, encode_request,
    encode_welcome, seal_frame, seal_greeting,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut out = Vec::new();
    if let Some(hello) = bytes.first_chunk::<HELLO_BYTES>() {
        let mut hello = *hello;
        let _ = decode_hello(&hello);
        seal_greeting(&mut hello);
        if let Ok(value) = decode_hello(&hello) {
            assert_eq!(encode_hello(&value), hello);
        }
    }
    if let Some(welcome) = bytes.first_chunk::<WELCOME_BYTES>() {
        let mut welcome = *welcome;
        let _ = decode_welcome(&welcome);
        seal_greeting(&mut welcome);
        if let Ok(value) = decode_welcome(&welcome) {
            assert_eq!(encode_welcome(&value), welcome);
        }
    }
    let Some(head) = bytes.first_chunk::<HEAD_BYTES>() else { return };
    let Ok(head) = Head::parse(head) else { return };
    let (mut requests, mut answers) = (RequestTables::default(), AnswerTables::default());
    let _ = decode_request(&head, bytes, &mut requests);
    let _ = decode_answer(&head, bytes, &mut answers);
    let Some(frame) = bytes.get(..HEAD_BYTES + head.table_bytes()) else { return };
    let mut frame = frame.to_vec();
    seal_frame(&mut frame);
    let Some(Ok(head)) = frame.first_chunk().map(Head::parse) else { return };
    if let Ok(request) = decode_request(&head, &frame, &mut requests) {
        encode_request(&request, head.id(), &mut out);
        assert_eq!(out, frame);
    }
    if let Ok((answer, load)) = decode_answer(&head, &frame, &mut answers) {
        encode_answer(&answer, head.id(), load, &mut out);
        assert_eq!(out, frame);
    }
});
