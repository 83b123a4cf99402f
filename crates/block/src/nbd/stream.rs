//! What a client is spoken to over: its socket, as it is or with TLS.

use super::tls::TlsStream;
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

    /// Sends all of it.
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
