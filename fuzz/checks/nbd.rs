//! Any bytes from a client of the network block device protocol are an option, a request or the end
//! of the connection. A request that is let through lies within the volume.
//!
//! For the fuzz target, and for the test of random bytes that needs no fuzzer
//! (crates/consumers/volume/tests/nbd_bytes.rs).

use hecaton_block::nbd::handshake::{Export, Gate, Negotiated, greet, negotiate};
use hecaton_block::nbd::wire::{Command, MAX_PAYLOAD, OPTION_MAGIC, REQUEST_MAGIC, Request};
use std::io::{self, Read, Write};

const SIZE: u64 = 1 << 20;

/// A client that has said everything beforehand, and does not listen.
struct Client<'a>(&'a [u8]);

impl Read for Client<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for Client<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether a client that says this is let in.
pub(crate) fn check(bytes: &[u8]) -> bool {
    let export = Export { name: "disk".to_owned(), size_bytes: SIZE, read_only: false };
    // The client's flags and the first magic are right: a fuzzer would take long to find them.
    let begun = [&3u32.to_be_bytes(), &OPTION_MAGIC.to_be_bytes()[..], bytes].concat();
    let mut client = Client(&begun);
    let Ok(flags) = greet(&mut client) else { return false };
    // After a choice before TLS, the bytes do not belong to the protocol any more.
    let before = client.0;
    let tls_first = negotiate(&mut client, flags, &Gate::TlsFirst, &export, || Ok(()));
    assert!(!matches!(tls_first, Ok(Negotiated::Chosen(..))), "let in without TLS");
    client.0 = before;
    let negotiated = negotiate(&mut client, flags, &Gate::Plain, &export, || Ok(()));
    let Ok(Negotiated::Chosen(session, ())) = negotiated else { return false };
    for request in client.0.chunks_exact(Request::BYTES) {
        let mut request: [u8; Request::BYTES] = request.try_into().expect("as long as it is");
        request[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        let Ok(request) = Request::decode(&request) else { return true };
        if request.check(SIZE, session).is_err() {
            continue;
        }
        match request.command {
            Command::Flush | Command::Disconnect => continue,
            Command::Unknown(command) => panic!("command {command} was let through"),
            Command::BlockStatus => assert!(session.allocation),
            Command::Read | Command::Write => assert!(request.length <= MAX_PAYLOAD),
            Command::Trim | Command::WriteZeroes => {}
        }
        assert!(request.length > 0 && request.offset + u64::from(request.length) <= SIZE);
    }
    true
}
