//! The connection between two nodes: TLS, where they have certificates.

use super::{HandOverError, MAX_LINE_BYTES, PATIENCE};
use hecaton_pki::{Credentials, Identity, Role};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, ServerConnection, StreamOwned};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, BufRead as _, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

trait Both: Read + Write + Send {}
impl<T: Read + Write + Send> Both for T {}

/// A connection, and who is at its other end.
pub(crate) struct Stream {
    socket: TcpStream,
    inner: BufReader<Box<dyn Both>>,
    /// The node that its certificate names.
    pub(crate) peer: Option<String>,
}

impl Stream {
    /// Connects to a node, which must be that one if it has a certificate to show.
    pub(crate) fn connect(
        to: SocketAddr,
        node: &str,
        tls_dir: Option<&Path>,
    ) -> Result<Stream, HandOverError> {
        let socket = TcpStream::connect_timeout(&to, PATIENCE)?;
        let socket = with_patience(socket)?;
        let Some(dir) = tls_dir else { return Stream::plain(socket) };
        let config = Arc::clone(&Credentials::open(dir)?.now().borrower);
        // The node's name is checked below: the certificate of a node contains no address.
        let name = ServerName::from(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        let mut connection = ClientConnection::new(config, name)?;
        while connection.is_handshaking() {
            connection.complete_io(&mut &socket)?;
        }
        let found = node_of(connection.peer_certificates())?;
        if found != node {
            return Err(HandOverError::OtherNode { found, wanted: node.to_owned() });
        }
        let inner = buffered(StreamOwned::new(connection, socket.try_clone()?));
        Ok(Stream { socket, inner, peer: Some(found) })
    }

    /// Shakes hands with who has connected, and hears what it wants, or ends the connection before
    /// long.
    pub(crate) fn accept<T: DeserializeOwned>(
        socket: TcpStream,
        tls_dir: Option<&Path>,
    ) -> Result<(T, Stream), HandOverError> {
        let watched = socket.try_clone()?;
        let (said, until_said) = mpsc::channel::<()>();
        thread::scope(|scope| {
            scope.spawn(move || {
                if let Err(RecvTimeoutError::Timeout) = until_said.recv_timeout(PATIENCE) {
                    // One that says a byte now and then would else be heard for ever.
                    let _ = watched.shutdown(Shutdown::Both);
                }
            });
            let accepted =
                Stream::greet(socket, tls_dir).and_then(|mut stream| Ok((stream.hear()?, stream)));
            drop(said);
            accepted
        })
    }

    fn greet(socket: TcpStream, tls_dir: Option<&Path>) -> Result<Stream, HandOverError> {
        let socket = with_patience(socket)?;
        let Some(dir) = tls_dir else { return Stream::plain(socket) };
        let config = Arc::clone(&Credentials::open(dir)?.now().lender);
        let mut connection = ServerConnection::new(config)?;
        while connection.is_handshaking() {
            connection.complete_io(&mut &socket)?;
        }
        let peer = Some(node_of(connection.peer_certificates())?);
        let inner = buffered(StreamOwned::new(connection, socket.try_clone()?));
        Ok(Stream { socket, inner, peer })
    }

    fn plain(socket: TcpStream) -> Result<Stream, HandOverError> {
        let inner = buffered(socket.try_clone()?);
        Ok(Stream { socket, inner, peer: None })
    }

    /// How long the next bytes may take to come.
    pub(crate) fn wait_for(&self, patience: Duration) -> io::Result<()> {
        self.socket.set_read_timeout(Some(patience))
    }

    pub(crate) fn say(&mut self, what: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(what)?;
        line.push(b'\n');
        self.write_all(&line)?;
        self.flush()
    }

    pub(crate) fn hear<T: DeserializeOwned>(&mut self) -> Result<T, HandOverError> {
        let mut line = Vec::new();
        let most = MAX_LINE_BYTES as u64 + 1;
        (&mut self.inner).take(most).read_until(b'\n', &mut line)?;
        match line.pop() {
            Some(b'\n') => {}
            Some(_) if line.len() >= MAX_LINE_BYTES => {
                return Err(HandOverError::Foreign("a line does not end".to_owned()));
            }
            _ => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
        }
        serde_json::from_slice(&line).map_err(|error| HandOverError::Foreign(error.to_string()))
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.inner.read(buffer)
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.inner.get_mut().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.get_mut().flush()
    }
}

fn buffered(stream: impl Both + 'static) -> BufReader<Box<dyn Both>> {
    BufReader::new(Box::new(stream))
}

fn with_patience(socket: TcpStream) -> io::Result<TcpStream> {
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    socket.set_nodelay(true)?;
    Ok(socket)
}

/// The node that a certificate names, which an authority vouches for.
fn node_of(
    chain: Option<&[rustls::pki_types::CertificateDer<'_>]>,
) -> Result<String, HandOverError> {
    let own = chain.and_then(<[_]>::first).ok_or(rustls::Error::NoCertificatesPresented)?;
    let identity = Identity::of(own)?;
    match identity.role {
        Role::Node => Ok(identity.name),
        _ => Err(HandOverError::Foreign(format!("{identity} is no node"))),
    }
}
