//! TLS for clients. Both ends show a certificate of the cluster's authority.
//!
//! The role in the client's certificate says what the client may do. While one thread waits for the
//! client's next bytes, others answer. So threads lock the state of the connection to compute,
//! never while they wait for the socket. Otherwise nothing could be read from a client that does
//! not read.

use super::handshake::Gate;
use crate::attach;
use hecaton_pki::{Credentials, Identity, Role};
use rustix::net::{SendFlags, send};
use rustls::ServerConnection;
use std::fs::File;
use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex, MutexGuard};

/// Bytes of one read from the socket: two TLS records.
const INCOMING_BYTES: usize = 32 << 10;

/// Rights of the owner of a certificate at a socket that offers clients the role `offered`.
pub(super) fn admit(who: &Identity, offered: attach::Role) -> (Gate, attach::Role) {
    match who.role {
        Role::Client | Role::Admin => (Gate::Encrypted, offered),
        Role::ReadOnly => (Gate::Encrypted, attach::Role::Reader),
        Role::Manager | Role::Node | Role::Export => {
            let why = format!(
                "{who} may not use volumes: that takes a certificate of role client, admin or read-only, \
                 as `hecaton pki issue NAME --role client` makes it"
            );
            (Gate::Shut(why), offered)
        }
    }
}

/// A client's connection, from its handshake on.
pub(super) struct TlsStream {
    socket: Arc<File>,
    connection: Mutex<ServerConnection>,
    /// Locked by the thread that reads.
    incoming: Mutex<Incoming>,
    /// Encrypted bytes that go to the socket. Locked by the thread that sends.
    outgoing: Mutex<Vec<u8>>,
}

struct Incoming {
    bytes: Box<[u8]>,
    /// Those of them that the connection has not had yet.
    from: usize,
    to: usize,
}

impl TlsStream {
    /// Shakes hands, and returns the identity in the client's certificate, which is valid.
    pub(super) fn accept(
        socket: Arc<File>,
        credentials: &Credentials,
    ) -> io::Result<(TlsStream, Identity)> {
        let config = Arc::clone(&credentials.now().server);
        let mut connection = ServerConnection::new(config).map_err(io::Error::other)?;
        while connection.is_handshaking() {
            connection.complete_io(&mut &*socket)?;
        }
        let own = connection.peer_certificates().and_then(|chain| chain.first());
        let own = own.ok_or_else(|| io::Error::other("it shows no certificate"))?;
        let identity = Identity::of(own).map_err(io::Error::other)?;
        let incoming =
            Incoming { bytes: vec![0; INCOMING_BYTES].into_boxed_slice(), from: 0, to: 0 };
        let stream = TlsStream {
            socket,
            connection: Mutex::new(connection),
            incoming: Mutex::new(incoming),
            outgoing: Mutex::default(),
        };
        Ok((stream, identity))
    }

    pub(super) fn socket(&self) -> &File {
        &self.socket
    }

    /// Sends all of it.
    pub(super) fn send(&self, parts: &[&[u8]]) -> io::Result<()> {
        let mut outgoing = self.outgoing.lock().expect("no thread panics as it sends");
        let mut parts = parts.iter().copied().filter(|part| !part.is_empty()).peekable();
        let mut rest: &[u8] = &[];
        while !rest.is_empty() || parts.peek().is_some() {
            outgoing.clear();
            {
                let mut connection = self.connection();
                loop {
                    if rest.is_empty() {
                        match parts.next() {
                            Some(part) => rest = part,
                            None => break,
                        }
                    }
                    match connection.writer().write(rest)? {
                        // It holds as much as it does.
                        0 => break,
                        taken => rest = &rest[taken..],
                    }
                }
                while connection.wants_write() {
                    connection.write_tls(&mut *outgoing)?;
                }
            }
            (&*self.socket).write_all(&outgoing)?;
        }
        Ok(())
    }

    fn connection(&self) -> MutexGuard<'_, ServerConnection> {
        self.connection.lock().expect("no thread panics with the connection")
    }
}

impl Drop for TlsStream {
    /// Says that this is the end, to a client that listens.
    fn drop(&mut self) {
        let Ok(connection) = self.connection.get_mut() else { return };
        connection.send_close_notify();
        let mut last = Vec::new();
        while connection.wants_write() && connection.write_tls(&mut last).is_ok() {}
        // One that does not is not waited for.
        let _ = send(&*self.socket, &last, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }
}

impl Read for &TlsStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut incoming = self.incoming.lock().expect("no thread panics as it reads");
        let incoming = &mut *incoming;
        loop {
            {
                let mut connection = self.connection();
                loop {
                    match connection.reader().read(buffer) {
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                        read => return read,
                    }
                    let mut left = &incoming.bytes[incoming.from..incoming.to];
                    if left.is_empty() {
                        break;
                    }
                    incoming.from += connection.read_tls(&mut left)?;
                    // Answers to what it says of keys go with what is sent next.
                    connection.process_new_packets().map_err(io::Error::other)?;
                }
            }
            match (&*self.socket).read(&mut incoming.bytes) {
                Ok(0) => return Ok(0),
                Ok(read) => (incoming.from, incoming.to) = (0, read),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl Write for &TlsStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.send(&[bytes])?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
