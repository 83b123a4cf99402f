//! How a host with a token gets its certificate: the one exchange, as both ends see it.
//!
//! TLS 1.3. Only the authority shows a certificate, of [`OWN_NAME`]; the host knows it by the
//! token's fingerprint, and sends the token's secret. The key is the host's, and never leaves it.
//!
//! | who | says, and then no more |
//! |---|---|
//! | the host | a [`Question`], as JSON |
//! | the authority | an [`Answer`], as JSON |

use crate::authority::{Admitted, Authority, AuthorityError, OWN_NAME, make_dir, replace};
use crate::identity::{Identity, Role};
use crate::token::Token;
use crate::trust::credentials::{CA_FILE, CERTIFICATE_FILE, CRL_FILE, KEY_FILE};
use rcgen::{CertificateParams, KeyPair};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{
    CertificateError, ClientConfig, ClientConnection, DigitallySignedStruct, RootCertStore,
    ServerConfig, ServerConnection, SignatureScheme, StreamOwned,
};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long one exchange may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Exchanges at one time; more are closed at once.
const MAX_EXCHANGES: usize = 32;

/// Longest question.
const MAX_QUESTION_BYTES: u64 = 16 << 10;

/// Longest answer: a list of some hundred thousand revoked certificates.
const MAX_ANSWER_BYTES: u64 = 16 << 20;

/// Between two attempts to accept, when that does not work.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The key of a host that has asked and has had no answer: it asks with the same one again.
const ASKED_KEY_FILE: &str = "key.pem.asked";

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    secret: String,
    name: String,
    /// PEM of PKCS #10.
    request: String,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Admitted(Admitted),
    Refused(String),
}

/// Why a host has no certificate.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// Nobody answers there.
    #[error("the authority at {at} does not answer; is `hecaton pki serve` running there?")]
    Unreachable {
        /// Where, as the token says.
        at: String,
        /// Error of the connection or the exchange.
        source: io::Error,
    },
    /// The answering authority is not the one that the token names.
    #[error(
        "what answers at {0} is not the authority that the token is of; nothing was told to it"
    )]
    OtherAuthority(String),
    /// It refuses.
    #[error("the authority at {at} refuses: {reason}")]
    Refused {
        /// Where.
        at: String,
        /// Its own words.
        reason: String,
    },
    /// The answer cannot be used.
    #[error("what the authority at {at} answers cannot be used: {reason}")]
    Strange {
        /// Where.
        at: String,
        /// Why the answer cannot be used.
        reason: String,
    },
    /// The key cannot be made or kept.
    #[error("cannot make a key")]
    Key(#[from] rcgen::Error),
    /// The files cannot be written.
    #[error(transparent)]
    Files(#[from] AuthorityError),
}

/// Gets a certificate for the node `name` with a token, into `dir`.
pub fn join(token: &Token, name: &str, dir: &Path) -> Result<(), JoinError> {
    make_dir(dir)?;
    let asked = dir.join(ASKED_KEY_FILE);
    let kept = fs::read_to_string(&asked).ok().and_then(|text| KeyPair::from_pem(&text).ok());
    let key = match kept {
        Some(key) => key,
        None => {
            let key = KeyPair::generate()?;
            replace(&asked, &key.serialize_pem())?;
            key
        }
    };
    let request = CertificateParams::default().serialize_request(&key)?.pem()?;
    let question = Question { secret: token.secret(), name: name.to_owned(), request };
    let at = token.at().to_owned();
    let admitted = match ask(token, &question)? {
        Answer::Admitted(admitted) => admitted,
        Answer::Refused(reason) => return Err(JoinError::Refused { at, reason }),
    };
    let own = CertificateDer::from_pem_slice(admitted.certificate.as_bytes());
    let identity = own.ok().and_then(|own| Identity::of(&own).ok());
    if identity != Some(Identity { name: name.to_owned(), role: Role::Node }) {
        return Err(JoinError::Strange { at, reason: "it is another's certificate".to_owned() });
    }
    replace(&dir.join(CA_FILE), &admitted.authority)?;
    replace(&dir.join(CRL_FILE), &admitted.revoked)?;
    replace(&dir.join(KEY_FILE), &key.serialize_pem())?;
    replace(&dir.join(CERTIFICATE_FILE), &admitted.certificate)?;
    // It is in its place now; were it to stay, nobody would mind.
    let _ = fs::remove_file(asked);
    Ok(())
}

fn ask(token: &Token, question: &Question) -> Result<Answer, JoinError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = Named { token: token.clone(), provider: Arc::clone(&provider) };
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(io::Error::other)
        .map(|config| config.dangerous().with_custom_certificate_verifier(Arc::new(verifier)));
    let exchanged = config.and_then(|config| {
        let config = Arc::new(config.with_no_client_auth());
        let name = ServerName::try_from(OWN_NAME).map_err(io::Error::other)?;
        let connection = ClientConnection::new(config, name).map_err(io::Error::other)?;
        let deadline = Instant::now() + PATIENCE;
        let stream = Timely { stream: connect(token.at(), deadline)?, deadline };
        let mut stream = StreamOwned::new(connection, stream);
        // Not a byte of the secret before the authority is known.
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock)?;
        }
        tell(&mut stream, &serde_json::to_vec(question)?)?;
        let mut answer = Vec::new();
        (&mut stream).take(MAX_ANSWER_BYTES).read_to_end(&mut answer)?;
        Ok(answer)
    });
    let at = token.at().to_owned();
    match exchanged {
        Ok(answer) => serde_json::from_slice(&answer)
            .map_err(|error| JoinError::Strange { at, reason: error.to_string() }),
        Err(error) => match error.get_ref().and_then(|inner| inner.downcast_ref()) {
            Some(rustls::Error::InvalidCertificate(_)) => Err(JoinError::OtherAuthority(at)),
            _ => Err(JoinError::Unreachable { at, source: error }),
        },
    }
}

fn connect(at: &str, deadline: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::other("the name has no address");
    for address in at.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left(deadline)?) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Sends all that this end has to say.
fn tell<C, D>(stream: &mut StreamOwned<C, Timely>, text: &[u8]) -> io::Result<()>
where
    C: std::ops::DerefMut<Target = rustls::ConnectionCommon<D>>,
    D: rustls::SideData,
{
    stream.write_all(text)?;
    stream.conn.send_close_notify();
    stream.flush()
}

/// Takes the authority that the token names, and no other.
#[derive(Debug)]
struct Named {
    token: Token,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Named {
    fn verify_server_cert(
        &self,
        own: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        host: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let named = between.iter().find(|certificate| self.token.names(certificate));
        let named = named.ok_or(CertificateError::UnknownIssuer)?;
        let mut roots = RootCertStore::empty();
        roots.add(named.clone().into_owned())?;
        let provider = Arc::clone(&self.provider);
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider);
        let verifier =
            verifier.build().map_err(|error| rustls::Error::General(error.to_string()))?;
        verifier.verify_server_cert(own, &[], host, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.2 is not spoken".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// A socket that is done with by then, however slowly its peer goes on.
struct Timely {
    stream: TcpStream,
    deadline: Instant,
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

impl Read for Timely {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(left(self.deadline)?))?;
        self.stream.read(buffer)
    }
}

impl Write for Timely {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(left(self.deadline)?))?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An authority that takes in those who have a token.
#[derive(Clone, Debug)]
pub struct Reception {
    dir: PathBuf,
    /// How long the certificates are good for that it signs.
    days: u32,
    under_way: Arc<AtomicUsize>,
}

impl Reception {
    /// Serves the authority in `dir`, and locks it for each exchange only.
    pub fn open(dir: &Path, days: u32) -> Result<Reception, AuthorityError> {
        Authority::open(dir)?;
        Ok(Reception { dir: dir.to_owned(), days, under_way: Arc::default() })
    }

    /// Takes in whoever comes, as long as the process runs.
    pub fn serve(&self, listener: &TcpListener) {
        loop {
            match listener.accept() {
                Ok((stream, peer)) => self.begin(stream, peer),
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }

    fn begin(&self, stream: TcpStream, peer: SocketAddr) {
        if self.under_way.fetch_add(1, Ordering::AcqRel) >= MAX_EXCHANGES {
            self.under_way.fetch_sub(1, Ordering::AcqRel);
            tracing::warn!(%peer, "closed a connection: {MAX_EXCHANGES} are under way");
            return;
        }
        let reception = self.clone();
        let begun = thread::Builder::new().name("joining".into()).spawn(move || {
            let deadline = Instant::now() + PATIENCE;
            if let Err(error) = reception.exchange(Timely { stream, deadline }, peer) {
                tracing::warn!(%peer, "nobody was taken in: {error}");
            }
            reception.under_way.fetch_sub(1, Ordering::AcqRel);
        });
        if let Err(error) = begun {
            self.under_way.fetch_sub(1, Ordering::AcqRel);
            tracing::warn!(%peer, %error, "no thread for a connection");
        }
    }

    fn exchange(&self, stream: Timely, peer: SocketAddr) -> io::Result<()> {
        let (chain, key) = Authority::open(&self.dir)
            .and_then(|authority| authority.own_face())
            .map_err(io::Error::other)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .and_then(|config| config.with_no_client_auth().with_single_cert(chain, key))
            .map_err(io::Error::other)?;
        let connection = ServerConnection::new(Arc::new(config)).map_err(io::Error::other)?;
        let mut stream = StreamOwned::new(connection, stream);
        let mut question = Vec::new();
        (&mut stream).take(MAX_QUESTION_BYTES).read_to_end(&mut question)?;
        let question: Question = serde_json::from_slice(&question)?;
        let answer = match self.answer(&question) {
            Ok(admitted) => {
                tracing::info!(%peer, node = question.name, "took a node in");
                Answer::Admitted(admitted)
            }
            Err(reason) => {
                tracing::warn!(%peer, node = question.name, "refused a node: {reason}");
                Answer::Refused(reason)
            }
        };
        tell(&mut stream, &serde_json::to_vec(&answer)?)
    }

    fn answer(&self, question: &Question) -> Result<Admitted, String> {
        let Question { secret, name, request } = question;
        if !is_name(name) {
            return Err("that cannot be a node's name".to_owned());
        }
        let admitted = Authority::open(&self.dir)
            .and_then(|authority| authority.admit(secret, name, request, self.days));
        admitted.map_err(|error| error.to_string())
    }
}

/// Whether the name is safe in the index, in a path and in a log. The manager checks further rules
/// for names of nodes.
fn is_name(name: &str) -> bool {
    (1..=64).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        && !name.starts_with(['.', '-'])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authority::TokenWish;
    use crate::trust::credentials::Credentials;

    /// An authority that takes nodes in, for as long as the tests run.
    struct World {
        scratch: tempfile::TempDir,
        at: String,
    }

    impl World {
        fn start() -> World {
            let scratch = tempfile::tempdir().expect("a directory");
            let dir = scratch.path().join("pki");
            drop(Authority::init(&dir).expect("made"));
            let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
            let at = listener.local_addr().expect("an address").to_string();
            let reception = Reception::open(&dir, 30).expect("opened");
            thread::spawn(move || reception.serve(&listener));
            World { scratch, at }
        }

        /// As another command does.
        fn authority(&self) -> Authority {
            Authority::open(&self.scratch.path().join("pki")).expect("opened")
        }

        fn token(&self, name: Option<&str>, uses: u32) -> Token {
            let name = name.map(str::to_owned);
            let wish = TokenWish { at: self.at.clone(), name, uses, hours: 1 };
            self.authority().grant(&wish).expect("given out")
        }

        fn dir(&self, name: &str) -> PathBuf {
            self.scratch.path().join(name)
        }
    }

    #[test]
    fn who_has_a_token_is_taken_in_once() {
        let world = World::start();
        let token = world.token(None, 1);
        join(&token, "a", &world.dir("a")).expect("taken in");
        let own = Credentials::open(&world.dir("a")).expect("they fit");
        let identity = Identity { name: "a".to_owned(), role: Role::Node };
        assert_eq!(own.now().identity, identity);
        assert!(!world.dir("a").join(ASKED_KEY_FILE).exists());
        let refused = join(&token, "b", &world.dir("b")).expect_err("it is used up").to_string();
        assert!(refused.contains("used up"), "{refused}");
        assert!(!world.dir("b").join(CERTIFICATE_FILE).exists());
        // It is revoked like any other.
        assert_eq!(world.authority().revoke("a").expect("revoked"), 1);
    }

    #[test]
    fn an_answer_that_was_lost_is_given_again() {
        let world = World::start();
        let token = world.token(None, 1);
        join(&token, "a", &world.dir("a")).expect("taken in");
        // As if the host had gone down before it had written the certificate.
        fs::rename(world.dir("a").join(KEY_FILE), world.dir("a").join(ASKED_KEY_FILE))
            .expect("moved");
        join(&token, "a", &world.dir("a")).expect("answered again");
        Credentials::open(&world.dir("a")).expect("they fit");
    }

    #[test]
    fn a_name_that_has_a_certificate_takes_a_token_of_its_own() {
        let world = World::start();
        let any = world.token(None, 2);
        join(&any, "a", &world.dir("a")).expect("taken in");
        let error = join(&any, "a", &world.dir("impostor")).expect_err("a has one").to_string();
        assert!(error.contains("`a` has a certificate"), "{error}");
        // The refused request has not used up the token.
        join(&any, "b", &world.dir("b")).expect("taken in");
        let named = world.token(Some("a"), 1);
        let error = join(&named, "c", &world.dir("c")).expect_err("it is a's").to_string();
        assert!(error.contains("the token is for node `a`"), "{error}");
        join(&named, "a", &world.dir("a-again")).expect("taken in");
        let error = join(&world.token(None, 1), "../a", &world.dir("x")).expect_err("no name");
        assert!(error.to_string().contains("cannot be a node's name"), "{error}");
    }

    #[test]
    fn a_token_is_told_to_its_own_authority_only() {
        let (world, other) = (World::start(), World::start());
        let token = world.token(None, 1).to_string();
        let elsewhere = token.replace(&world.at, &other.at).parse().expect("a token");
        let error = join(&elsewhere, "a", &world.dir("a")).expect_err("it is another authority");
        assert!(matches!(error, JoinError::OtherAuthority(_)), "{error:?}");
        // A manager's certificate of the same authority does not do either.
        let wish = crate::Wish {
            identity: Identity { name: "m".to_owned(), role: Role::Manager },
            hosts: vec!["127.0.0.1".to_owned()],
            days: 1,
            renew: false,
        };
        let manager = world.authority().issue(&wish).expect("issued").dir;
        let mut chain = vec![CertificateDer::from_pem_file(manager.join("cert.pem")).expect("PEM")];
        chain.push(CertificateDer::from_pem_file(manager.join("ca.pem")).expect("PEM"));
        let verifier = Named {
            token: token.parse().expect("a token"),
            provider: Arc::new(rustls::crypto::ring::default_provider()),
        };
        let name = ServerName::try_from(OWN_NAME).expect("a name");
        let found =
            verifier.verify_server_cert(&chain[0], &chain[1..], &name, &[], UnixTime::now());
        assert!(matches!(found, Err(rustls::Error::InvalidCertificate(_))), "{found:?}");
        // Withdrawn.
        assert_eq!(world.authority().withdraw_tokens().expect("withdrawn"), 1);
        let token = token.parse().expect("a token");
        let error = join(&token, "a", &world.dir("a")).expect_err("withdrawn").to_string();
        assert!(error.contains("withdrawn"), "{error}");
    }

    #[test]
    fn who_says_something_else_is_not_answered_and_holds_nobody_up() {
        let world = World::start();
        let silent: Vec<_> = (0..MAX_EXCHANGES / 2)
            .map(|_| TcpStream::connect(&world.at).expect("connected"))
            .collect();
        let mut plain = TcpStream::connect(&world.at).expect("connected");
        plain.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("sent");
        let mut answer = Vec::new();
        // An alert, or nothing.
        let _ = plain.read_to_end(&mut answer);
        assert!(answer.len() < 64, "{answer:?}");
        join(&world.token(None, 1), "a", &world.dir("a")).expect("taken in");
        drop(silent);
    }
}
