//! The plain TCP that paging is compared with: no protocol of ours, no threads beside the two ends.
//!
//! A request is 16 bytes, of which the first eight say how many bytes the answer has. With 4096
//! that is the ping-pong of `bench fault`, with a gigabyte the stream of `bench stream`.

use anyhow::Context as _;
use std::{
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

const REQUEST_BYTES: usize = 16;

/// What one read or write call moves on either side of a stream.
const CHUNK_BYTES: usize = 256 << 10;

/// Answers on a loopback port until the process ends. One thread for each connection, blocking.
pub(super) fn serve() -> anyhow::Result<SocketAddr> {
    let listener =
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen on loopback")?;
    let address = listener.local_addr()?;
    thread::Builder::new().name("wire".into()).spawn(move || {
        for stream in listener.incoming().flatten() {
            // A client that goes away ends its own connection and nothing else.
            let _ = thread::Builder::new().name("wire".into()).spawn(move || answer(stream));
        }
    })?;
    Ok(address)
}

fn answer(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut request = [0; REQUEST_BYTES];
    let chunk = vec![0x5a; CHUNK_BYTES];
    loop {
        match stream.read_exact(&mut request) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(()),
            other => other?,
        }
        let (length, _) = request.split_at(8);
        let mut left = u64::from_le_bytes(length.try_into().expect("eight bytes"));
        while left > 0 {
            let now = left.min(CHUNK_BYTES as u64);
            stream.write_all(&chunk[..now as usize])?;
            left -= now;
        }
    }
}

/// The asking end.
pub(super) struct Wire {
    stream: TcpStream,
    buffer: Vec<u8>,
}

/// What is read on the stack, which `hecaton run` does not page: a buffer on the heap could itself
/// be evicted between two round trips, and the wire would look slower than it is.
const SMALL_BYTES: usize = 4096;

impl Wire {
    pub(super) fn connect(address: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(address)
            .with_context(|| format!("cannot reach the plain TCP server at {address}"))?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, buffer: vec![0; CHUNK_BYTES] })
    }

    /// Asks for `bytes` and reads them all.
    pub(super) fn ask(&mut self, bytes: u64) -> anyhow::Result<Duration> {
        let mut request = [0; REQUEST_BYTES];
        request[..8].copy_from_slice(&bytes.to_le_bytes());
        let mut small = [0; SMALL_BYTES];
        let buffer =
            if bytes <= SMALL_BYTES as u64 { &mut small[..] } else { &mut self.buffer[..] };
        let start = Instant::now();
        self.stream.write_all(&request)?;
        let mut left = bytes;
        while left > 0 {
            let most = left.min(buffer.len() as u64) as usize;
            let read = self.stream.read(&mut buffer[..most])?;
            anyhow::ensure!(read > 0, "the plain TCP server has gone away");
            left -= read as u64;
        }
        Ok(start.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_answer_has_the_length_asked_for() {
        let mut wire = Wire::connect(serve().unwrap()).unwrap();
        for bytes in [4096, 1, CHUNK_BYTES as u64 * 3 + 7, 4096] {
            wire.ask(bytes).unwrap();
        }
        wire.stream.set_nonblocking(true).unwrap();
        let surplus = wire.stream.read(&mut [0]).unwrap_err();
        assert_eq!(surplus.kind(), ErrorKind::WouldBlock);
    }
}
