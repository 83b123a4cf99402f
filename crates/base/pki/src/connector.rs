//! TLS for the HTTP client, with errors that say which end is wrong.
//!
//! The client's own TLS takes neither lists of what is revoked nor files that change, so it is put
//! in here, at the seam that the client has for that.

use crate::trust::credentials::Credentials;
use crate::trust::outside::OutsideCredentials;
use rustls::pki_types::ServerName;
use rustls::{AlertDescription, CertificateError, ClientConfig, ClientConnection, StreamOwned};
use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::path::Path;
use std::sync::{Arc, Mutex};
use ureq::config::Config;
use ureq::unversioned::resolver::DefaultResolver;
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, Either, LazyBuffers, NextTimeout, TcpConnector,
    Transport, TransportAdapter,
};

/// Certificates that a client shows and trusts; their files may change.
pub trait ClientTls: fmt::Debug + Send + Sync + 'static {
    /// The directory of the files.
    fn dir(&self) -> &Path;

    /// The current TLS configuration, and a generation number that changes with it.
    fn client(&self) -> (u64, Arc<ClientConfig>);

    /// Reason to refuse a certificate of the wrong kind.
    fn impostor(&self) -> &'static str;
}

impl ClientTls for Credentials {
    fn dir(&self) -> &Path {
        self.dir()
    }

    fn client(&self) -> (u64, Arc<ClientConfig>) {
        let loaded = self.now();
        (loaded.generation, Arc::clone(&loaded.client))
    }

    fn impostor(&self) -> &'static str {
        "it is not a manager's"
    }
}

impl ClientTls for OutsideCredentials {
    fn dir(&self) -> &Path {
        self.dir()
    }

    fn client(&self) -> (u64, Arc<ClientConfig>) {
        let loaded = self.now();
        (loaded.generation, Arc::clone(&loaded.client))
    }

    fn impostor(&self) -> &'static str {
        "it is not one for a server"
    }
}

/// An HTTP client. With `credentials` it speaks TLS to `https` addresses.
pub fn agent<C: ClientTls>(config: Config, credentials: Option<Arc<C>>) -> ureq::Agent {
    let Some(credentials) = credentials else { return config.new_agent() };
    let connector = ().chain(TcpConnector::default()).chain(TlsConnector(credentials));
    ureq::Agent::with_parts(config, connector, DefaultResolver::default())
}

/// An HTTP client that lives long: a certificate that was replaced is not shown any longer, not
/// even on connections that are kept.
#[derive(Debug)]
pub struct LastingAgent<C> {
    config: Config,
    credentials: Option<Arc<C>>,
    /// The client, and the number of what it shows.
    current: Mutex<(u64, ureq::Agent)>,
}

impl<C: ClientTls> LastingAgent<C> {
    /// As [`agent`].
    pub fn new(config: Config, credentials: Option<Arc<C>>) -> LastingAgent<C> {
        let generation = credentials.as_ref().map_or(0, |known| known.client().0);
        let made = agent(config.clone(), credentials.clone());
        LastingAgent { config, credentials, current: Mutex::new((generation, made)) }
    }

    /// The one to ask with now.
    pub fn now(&self) -> ureq::Agent {
        let mut current = self.current.lock().expect("no thread panics with it");
        if let Some(credentials) = &self.credentials {
            let (generation, _) = credentials.client();
            if current.0 != generation {
                let made = agent(self.config.clone(), self.credentials.clone());
                *current = (generation, made);
            }
        }
        current.1.clone()
    }
}

/// Why there is no connection, from the point of view of whoever asks.
#[derive(Debug, thiserror::Error)]
enum TlsError {
    #[error("it refuses the certificate in {dir}: {reason}")]
    Refused { dir: String, reason: &'static str },
    #[error("its certificate is not taken: {0}")]
    NotTaken(String),
    #[error("it does not speak TLS; is it http:// there?")]
    Plain,
    #[error("{0}")]
    Other(rustls::Error),
}

fn explain(error: io::Error, credentials: &dyn ClientTls) -> io::Error {
    let kind = error.kind();
    let Some(found) = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>())
    else {
        return error;
    };
    let refused =
        |reason| TlsError::Refused { dir: credentials.dir().display().to_string(), reason };
    let told = match found {
        rustls::Error::AlertReceived(alert) => match alert {
            AlertDescription::CertificateExpired => refused("it has expired"),
            AlertDescription::CertificateRevoked => refused("it is revoked"),
            AlertDescription::UnknownCA => refused("it is of another authority"),
            AlertDescription::UnsupportedCertificate => {
                refused("it is not one for a client, as a manager's is not")
            }
            AlertDescription::CertificateRequired
            | AlertDescription::BadCertificate
            | AlertDescription::CertificateUnknown
            | AlertDescription::AccessDenied
            | AlertDescription::DecryptError => refused("it cannot be verified"),
            _ => TlsError::Other(found.clone()),
        },
        rustls::Error::InvalidCertificate(wrong) => TlsError::NotTaken(match wrong {
            CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                format!("no authority in {}/ca.pem has issued it", credentials.dir().display())
            }
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                "it has expired".to_owned()
            }
            CertificateError::Revoked => "it is revoked".to_owned(),
            CertificateError::UnknownRevocationStatus => {
                format!("no list in {}/crl.pem is of its authority", credentials.dir().display())
            }
            CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
                credentials.impostor().to_owned()
            }
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                "it is for another host; `hecaton pki issue --host` says for which".to_owned()
            }
            other => other.to_string(),
        }),
        rustls::Error::InvalidMessage(_) => TlsError::Plain,
        other => TlsError::Other(other.clone()),
    };
    io::Error::new(kind, told)
}

#[derive(Debug)]
struct TlsConnector(Arc<dyn ClientTls>);

impl<In: Transport> Connector<In> for TlsConnector {
    type Out = Either<In, TlsTransport>;

    fn connect(
        &self,
        details: &ConnectionDetails<'_>,
        chained: Option<In>,
    ) -> Result<Option<Self::Out>, ureq::Error> {
        let Some(transport) = chained else { return Ok(None) };
        if !details.needs_tls() {
            return Ok(Some(Either::A(transport)));
        }
        let host = details.uri.host().unwrap_or_default();
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(host)
            .map_err(|_| ureq::Error::Tls("the address names no host"))?;
        let (_, client) = self.0.client();
        let connection = ClientConnection::new(client, name)
            .map_err(|error| ureq::Error::Io(io::Error::other(error)))?;
        let mut socket =
            TransportAdapter::new(transport.boxed(), Arc::clone(&details.current_time));
        socket.set_timeout(details.timeout);
        let mut stream = StreamOwned { conn: connection, sock: socket };
        stream
            .conn
            .complete_io(&mut stream.sock)
            .map_err(|error| ureq::Error::from(explain(error, &*self.0)))?;
        let config = details.config;
        let buffers = LazyBuffers::new(config.input_buffer_size(), config.output_buffer_size());
        Ok(Some(Either::B(TlsTransport { buffers, stream, credentials: Arc::clone(&self.0) })))
    }
}

struct TlsTransport {
    buffers: LazyBuffers,
    stream: StreamOwned<ClientConnection, TransportAdapter>,
    credentials: Arc<dyn ClientTls>,
}

impl fmt::Debug for TlsTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsTransport").finish_non_exhaustive()
    }
}

impl Transport for TlsTransport {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), ureq::Error> {
        self.stream.get_mut().set_timeout(timeout);
        let output = &self.buffers.output()[..amount];
        let sent = self.stream.write_all(output);
        sent.map_err(|error| explain(error, &*self.credentials).into())
    }

    /// The first answer is also where a client learns that its certificate is not taken: in TLS 1.3
    /// its own handshake is over before the server has looked at it.
    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, ureq::Error> {
        self.stream.get_mut().set_timeout(timeout);
        let input = self.buffers.input_append_buf();
        let amount = self.stream.read(input).map_err(|error| explain(error, &*self.credentials))?;
        self.buffers.input_appended(amount);
        Ok(amount > 0)
    }

    fn is_open(&mut self) -> bool {
        self.stream.get_mut().get_mut().is_open()
    }

    fn is_tls(&self) -> bool {
        true
    }
}
