//! One client, from the handshake to its end.

use super::connection::Connection;
use super::handshake::{Export, Gate, HandshakeError, Negotiated, greet, negotiate};
use super::stream::Stream;
use super::tls::{TlsStream, admit};
use super::wire::Session;
use crate::attach::{Attachment, Client, Role};
use crate::volume::Volume;
use hecaton_pki::{CredentialsDir, CredentialsError};
use rustix::net::sockopt::{Timeout, set_socket_keepalive, set_socket_timeout, set_tcp_nodelay};
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// How long a client may take for each step of the handshake.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(10);

/// Why a client is not served.
#[derive(Debug, thiserror::Error)]
enum Unserved {
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error("TLS with it fails: {0}")]
    Tls(#[source] io::Error),
    #[error("there is no certificate to show it: {0}")]
    Certificate(#[from] CredentialsError),
}

/// Serves one client to its end, over TLS if there is a certificate. Its socket is closed with
/// that.
pub(crate) fn serve(
    volume: Arc<Volume>,
    socket: Arc<File>,
    role: Role,
    certificate: Option<&CredentialsDir>,
) {
    // A Unix socket has neither.
    let _ = set_tcp_nodelay(&*socket, true);
    let _ = set_socket_keepalive(&*socket, true);
    let patience = |longest| {
        let of_reads = set_socket_timeout(&*socket, Timeout::Recv, longest);
        of_reads.and_then(|()| set_socket_timeout(&*socket, Timeout::Send, longest))
    };
    let met = patience(Some(HANDSHAKE_PATIENCE))
        .map_err(|errno| HandshakeError::from(io::Error::from(errno)).into())
        .and_then(|()| meet(&volume, &socket, role, certificate));
    match met {
        // It is attached until all that it asked for is done.
        Ok(Some((session, _attached, stream))) => {
            // From here on the client may take its time.
            if patience(None).is_ok() {
                Connection::new(volume, session, stream).serve();
            }
        }
        Ok(None) => {}
        Err(error) => {
            tracing::warn!(volume = volume.name(), %error, "a client's connection is closed");
        }
    }
}

/// Runs the handshake, and returns none if no requests will follow.
fn meet(
    volume: &Arc<Volume>,
    socket: &Arc<File>,
    role: Role,
    certificate: Option<&CredentialsDir>,
) -> Result<Option<(Session, Attachment, Stream)>, Unserved> {
    let export = |role| Export {
        name: volume.name().to_owned(),
        size_bytes: volume.size_bytes(),
        read_only: role == Role::Reader,
    };
    let who = Client::of_socket(&**socket);
    let attach = |who: &Client, role| volume.attach(who.clone(), role);
    let mut plain = &**socket;
    let flags = greet(&mut plain)?;
    let gate = if certificate.is_some() { Gate::TlsFirst } else { Gate::Plain };
    let negotiated = negotiate(&mut plain, flags, &gate, &export(role), || attach(&who, role))?;
    match (negotiated, certificate) {
        (Negotiated::Chosen(session, attached), _) => {
            Ok(Some((session, attached, Stream::Plain(Arc::clone(socket)))))
        }
        (Negotiated::StartTls, Some(certificate)) => {
            let credentials = certificate.open()?;
            let accepted = TlsStream::accept(Arc::clone(socket), &credentials);
            let (stream, identity) = accepted.map_err(Unserved::Tls)?;
            let (gate, role) = admit(&identity, role);
            if let Gate::Shut(why) = &gate {
                tracing::warn!(volume = volume.name(), client = %who, "a client is refused: {why}");
            }
            let who = who.certified(&identity.name);
            let negotiated =
                negotiate(&mut &stream, flags, &gate, &export(role), || attach(&who, role))?;
            Ok(match negotiated {
                Negotiated::Chosen(session, attached) => {
                    Some((session, attached, Stream::Tls(Arc::new(stream))))
                }
                Negotiated::Left | Negotiated::StartTls => None,
            })
        }
        (Negotiated::Left | Negotiated::StartTls, _) => Ok(None),
    }
}
