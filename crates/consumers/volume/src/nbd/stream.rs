//! Reads from and sends to an NBD client over its socket, with or without TLS.

use super::tls::TlsStream;
use super::wire::Request;
use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::sync::Arc;

/// A client's stream. One thread may read while another one sends.
#[derive(Clone)]
pub(super) enum Stream {
    /// A socket of either kind, which is read and written like a file.
    Plain(Arc<File>),
    /// The same, encrypted.
    Tls(Arc<TlsStream>),
}

impl Stream {
    pub(super) fn socket(&self) -> &File {
        match self {
            Stream::Plain(socket) => socket,
            Stream::Tls(stream) => stream.socket(),
        }
    }

    /// Sends all parts in full.
    pub(super) fn send(&self, parts: &[&[u8]]) -> io::Result<()> {
        let socket = match self {
            Stream::Tls(stream) => return stream.send(parts),
            Stream::Plain(socket) => socket,
        };
        let mut slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let mut left = slices.as_mut_slice();
        while !left.is_empty() {
            match (&**socket).write_vectored(left) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => IoSlice::advance_slices(&mut left, written),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(socket) => (&**socket).read(buffer),
            Stream::Tls(stream) => (&**stream).read(buffer),
        }
    }
}

/// Bytes that a client has sent and no request has consumed yet.
pub(super) struct Input {
    stream: Stream,
    buffer: Box<[u8]>,
    from: usize,
    to: usize,
}

/// Most bytes read at a time. A longer request waits until no other request is in flight.
const INPUT_BYTES: usize = Request::BYTES + (256 << 10);

impl Input {
    pub(super) fn new(stream: Stream) -> Input {
        // The allocator maps zeroed memory of this size and does not touch it.
        Input { stream, buffer: vec![0; INPUT_BYTES].into(), from: 0, to: 0 }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[self.from..self.to]
    }

    /// Whether the buffer has room for so many bytes at a time.
    pub(super) fn holds(&self, bytes: usize) -> bool {
        bytes <= self.buffer.len()
    }

    pub(super) fn consume(&mut self, bytes: usize) {
        self.from += bytes;
    }

    /// Reads once. The buffer must have room. Returns 0 at the end of the stream.
    pub(super) fn fill(&mut self) -> io::Result<usize> {
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
        } else if self.to == self.buffer.len() {
            self.buffer.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
        loop {
            match self.stream.read(&mut self.buffer[self.to..]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => {
                    let read = read?;
                    self.to += read;
                    return Ok(read);
                }
            }
        }
    }

    /// Fills `into`, and waits until all of its bytes have arrived.
    pub(super) fn read_exact(&mut self, into: &mut [u8]) -> io::Result<()> {
        let (first, rest) = into.split_at_mut(into.len().min(self.to - self.from));
        first.copy_from_slice(&self.buffer[self.from..][..first.len()]);
        self.consume(first.len());
        self.stream.read_exact(rest)
    }
}
