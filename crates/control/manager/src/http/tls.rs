//! Takes TLS connections, each in its own time, and knows who is at their other ends.

use crate::http::permission::{self, Call};
use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use hecaton_node::with_causes;
use hecaton_pki::{Credentials, Identity, IdentityError};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::server::TlsStream;

/// How long a peer may take over its handshake.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(5);

/// Handshakes at one time; further connections wait in the kernel's queue.
const MAX_HANDSHAKES: usize = 256;

/// How long a refused peer may take to read why.
const PARTING: Duration = Duration::from_secs(1);

/// Bytes that are read of a refused peer meanwhile.
const MAX_PARTING_BYTES: u64 = 64 << 10;

/// After this long a connection's certificate is looked at again: it may have been revoked, or be
/// over.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Time between two lines about refused peers: anybody can make one.
const LINE_INTERVAL: Duration = Duration::from_secs(1);

/// The first byte of a TLS handshake.
const TLS_HANDSHAKE: u8 = 0x16;

/// Answer to a client that speaks plain HTTP.
const PLAIN_REFUSAL: &str = "this manager speaks TLS only; use https:// and --tls-dir DIR\n";

/// Connections whose handshake is done.
#[derive(Debug)]
pub(crate) struct TlsListener {
    address: SocketAddr,
    done: mpsc::Receiver<(TlsStream<TcpStream>, SocketAddr)>,
    accepting: JoinHandle<()>,
}

impl TlsListener {
    /// To be called within a runtime.
    pub(crate) fn new(listener: TcpListener, credentials: Arc<Credentials>) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let (finished, done) = mpsc::channel(1);
        let accepting = tokio::spawn(accept_all(listener, credentials, finished));
        Ok(TlsListener { address, done, accepting })
    }
}

impl Drop for TlsListener {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.done.recv().await {
            Some(connection) => connection,
            // The accepting task ends with this listener only.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}

async fn accept_all(
    mut listener: TcpListener,
    credentials: Arc<Credentials>,
    finished: mpsc::Sender<(TlsStream<TcpStream>, SocketAddr)>,
) {
    let (places, lines) = (Arc::new(Semaphore::new(MAX_HANDSHAKES)), Arc::new(Lines::default()));
    while let Ok(place) = Arc::clone(&places).acquire_owned().await {
        let (stream, address) = Listener::accept(&mut listener).await;
        let acceptor = TlsAcceptor::from(Arc::clone(&credentials.now().server));
        let (finished, lines) = (finished.clone(), Arc::clone(&lines));
        tokio::spawn(async move {
            match timeout(HANDSHAKE_PATIENCE, shake_hands(stream, &acceptor)).await {
                Ok(Ok(stream)) => _ = finished.send((stream, address)).await,
                Ok(Err(reason)) => lines.refused(address, &reason),
                Err(_) => lines.refused(address, "it does not finish its handshake"),
            }
            drop(place);
        });
    }
}

/// The TLS stream, or why there is none.
async fn shake_hands(
    mut stream: TcpStream,
    acceptor: &TlsAcceptor,
) -> Result<TlsStream<TcpStream>, String> {
    let mut first = [0];
    if stream.peek(&mut first).await.map_err(|error| error.to_string())? == 1
        && first[0] != TLS_HANDSHAKE
    {
        let length = PLAIN_REFUSAL.len();
        let answer = format!(
            "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\n\
             Connection: close\r\n\r\n{PLAIN_REFUSAL}"
        );
        let _ = stream.write_all(answer.as_bytes()).await;
        part(stream).await;
        return Err("it does not speak TLS".to_owned());
    }
    match acceptor.accept(stream).into_fallible().await {
        Ok(stream) => Ok(stream),
        Err((error, stream)) => {
            part(stream).await;
            Err(with_causes(&error))
        }
    }
}

/// Lets the peer read what it was sent: a socket that is closed with bytes unread would take that
/// away.
async fn part(mut stream: TcpStream) {
    let _ = stream.shutdown().await;
    let mut rest = stream.take(MAX_PARTING_BYTES);
    let _ = timeout(PARTING, tokio::io::copy(&mut rest, &mut tokio::io::sink())).await;
}

/// Says in the log who was refused, and no more often than is good for the log.
#[derive(Debug, Default)]
struct Lines(Mutex<(Option<Instant>, u64)>);

impl Lines {
    fn refused(&self, peer: SocketAddr, reason: &str) {
        let mut lines = self.0.lock().expect("no thread panics with it");
        let (last, unsaid) = &mut *lines;
        if last.is_some_and(|last| last.elapsed() < LINE_INTERVAL) {
            *unsaid += 1;
            return;
        }
        *last = Some(Instant::now());
        let unsaid = std::mem::take(unsaid);
        tracing::warn!(%peer, unsaid, "refused a connection: {reason}");
    }
}

/// Peer of a connection.
#[derive(Clone, Debug)]
pub(crate) enum Peer {
    /// Nobody asked.
    Plain,
    /// The peer has shown a certificate.
    Certified(Arc<Certified>),
}

/// The certificate of a connection.
#[derive(Debug)]
pub(crate) struct Certified {
    address: SocketAddr,
    identity: Result<Identity, IdentityError>,
    chain: Vec<CertificateDer<'static>>,
    /// With which files it was found good last, and when.
    checked: Mutex<Option<(u64, Instant)>>,
}

impl Connected<IncomingStream<'_, TcpListener>> for Peer {
    fn connect_info(_: IncomingStream<'_, TcpListener>) -> Peer {
        Peer::Plain
    }
}

impl Connected<IncomingStream<'_, TlsListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, TlsListener>) -> Peer {
        let chain = stream.io().get_ref().1.peer_certificates().unwrap_or_default();
        let chain: Vec<_> = chain.iter().map(|one| one.clone().into_owned()).collect();
        let identity = match chain.first() {
            Some(own) => Identity::of(own),
            None => Err(IdentityError::Unreadable),
        };
        let (address, checked) = (*stream.remote_addr(), Mutex::default());
        Peer::Certified(Arc::new(Certified { address, identity, chain, checked }))
    }
}

/// Why a peer gets no answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Its certificate is not good any more: it should connect with a new one.
    Certificate(String),
    /// It may not.
    Role(String),
}

impl Certified {
    /// Whether it may do this at this moment. The log says so if it may not.
    pub(crate) fn check(
        &self,
        credentials: &Credentials,
        call: Option<Call<'_>>,
    ) -> Result<(), Refused> {
        let checked = self.check_certificate(credentials).and_then(|()| self.check_role(call));
        if let Err(Refused::Certificate(reason) | Refused::Role(reason)) = &checked {
            tracing::warn!(peer = %self.address, "refused a request: {reason}");
        }
        checked
    }

    fn check_certificate(&self, credentials: &Credentials) -> Result<(), Refused> {
        let loaded = credentials.now();
        let mut checked = self.checked.lock().expect("no thread panics with it");
        let is_fresh = checked.is_some_and(|(generation, at)| {
            generation == loaded.generation && at.elapsed() < CHECK_INTERVAL
        });
        if !is_fresh {
            let found = loaded.verify_client(&self.chain);
            found.map_err(|error| {
                Refused::Certificate(format!("the certificate is not good any more: {error}"))
            })?;
            *checked = Some((loaded.generation, Instant::now()));
        }
        Ok(())
    }

    fn check_role(&self, call: Option<Call<'_>>) -> Result<(), Refused> {
        let who = self.identity.as_ref().map_err(|error| Refused::Role(error.to_string()))?;
        let call = call.ok_or_else(|| Refused::Role("nobody may do that".to_owned()))?;
        permission::check(who, call).map_err(|error| Refused::Role(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ManagerServer;
    use crate::records::ledger::Keep;
    use hecaton_node::cluster::heartbeat::{HeartbeatError, ManagerLink};
    use hecaton_node::cluster::report::NodeReport;
    use hecaton_pki::{Authority, Role, Wish};
    use std::path::PathBuf;
    use tokio::runtime::Runtime;

    struct Cluster {
        _scratch: tempfile::TempDir,
        authority: Authority,
        runtime: Runtime,
        server: Option<ManagerServer>,
    }

    impl Cluster {
        fn start() -> Cluster {
            let scratch = tempfile::tempdir().expect("a directory");
            let authority = Authority::init(&scratch.path().join("pki")).expect("made");
            let runtime = Runtime::new().expect("a runtime");
            let mut cluster = Cluster { _scratch: scratch, authority, runtime, server: None };
            let credentials =
                Arc::new(Credentials::open(&cluster.issue_manager(&[])).expect("opened"));
            let address = ([127, 0, 0, 1], 0).into();
            let started = ManagerServer::start(address, Keep::InMemory, Some(credentials));
            cluster.server = Some(cluster.runtime.block_on(started).expect("started"));
            cluster
        }

        fn url(&self) -> String {
            self.server.as_ref().expect("started").url()
        }

        fn issue(&self, name: &str, role: Role, days: u32) -> PathBuf {
            let identity = Identity { name: name.to_owned(), role };
            let wish = Wish { identity, hosts: Vec::new(), days, renew: false };
            self.authority.issue(&wish).expect("issued").dir
        }

        /// The manager's certificate, or one in its place, for its address and these names.
        fn issue_manager(&self, names: &[&str]) -> PathBuf {
            let identity = Identity { name: "m".to_owned(), role: Role::Manager };
            let hosts = ["127.0.0.1"].iter().chain(names).map(|host| (*host).to_owned()).collect();
            let wish = Wish { identity, hosts, days: 1, renew: true };
            self.authority.issue(&wish).expect("issued").dir
        }

        fn credentials(&self, name: &str, role: Role) -> Arc<Credentials> {
            Arc::new(Credentials::open(&self.issue(name, role, 1)).expect("opened"))
        }

        fn agent(&self, name: &str, role: Role) -> ureq::Agent {
            let config = ureq::Agent::config_builder().http_status_as_error(false).build();
            hecaton_pki::agent(config, Some(self.credentials(name, role)))
        }
    }

    fn report(name: &str) -> NodeReport {
        NodeReport { name: name.to_owned(), boot: 1, ..NodeReport::default() }
    }

    #[test]
    fn every_route_asks_for_the_role() {
        let cluster = Cluster::start();
        let url = cluster.url();
        for (role, expected) in [
            (Role::Admin, [200, 200, 200, 404, 404, 404, 404, 403, 403, 404]),
            (Role::ReadOnly, [200, 200, 200, 403, 403, 403, 403, 403, 403, 404]),
            (Role::Node, [403, 200, 403, 403, 403, 403, 403, 200, 204, 404]),
        ] {
            let agent = cluster.agent(&format!("own-{role}"), role);
            let own = format!("own-{role}");
            let get = |path: &str| agent.get(format!("{url}{path}")).call();
            let found = [
                get("/v1/status"),
                get("/v1/donors"),
                get("/metrics"),
                agent.post(format!("{url}/v1/donors/x/drain")).send_empty(),
                agent.delete(format!("{url}/v1/donors/x/drain")).call(),
                agent.put(format!("{url}/v1/donors/x/limit?bytes=1")).send_empty(),
                agent.delete(format!("{url}/v1/donors/x/limit")).call(),
                agent.post(format!("{url}/v1/nodes/{own}/heartbeat")).send_json(report(&own)),
                agent.delete(format!("{url}/v1/nodes/{own}?boot=1")).call(),
                get("/v1/nothing"),
            ];
            let found = found.map(|response| response.expect("answered").status().as_u16());
            // An order to a donor that is not there is a matter for who may give it.
            assert_eq!(found, expected, "{role}");
        }
    }

    #[test]
    fn a_node_speaks_for_itself_only() {
        let cluster = Cluster::start();
        let link = ManagerLink::new(&cluster.url(), Some(cluster.credentials("a", Role::Node)));
        link.beat(&report("a")).expect("taken");
        let Err(HeartbeatError::Refused { reason, .. }) = link.beat(&report("b")) else {
            panic!("it took another's name");
        };
        assert!(reason.contains("node `a` may not speak for node `b`"), "{reason}");
        let agent = cluster.agent("c", Role::Node);
        let farewell = agent.delete(format!("{}/v1/nodes/a?boot=1", cluster.url())).call();
        assert_eq!(farewell.expect("answered").status(), 403);
    }

    #[test]
    fn revoking_counts_on_connections_that_are_open() {
        let cluster = Cluster::start();
        let link = ManagerLink::new(&cluster.url(), Some(cluster.credentials("a", Role::Node)));
        link.beat(&report("a")).expect("taken");
        cluster.authority.revoke("a").expect("revoked");
        let Err(HeartbeatError::Refused { reason, .. }) = link.beat(&report("a")) else {
            panic!("its connection was good for ever");
        };
        assert!(reason.contains("not good any more") && reason.contains("Revoked"), "{reason}");
        // And no other one comes about.
        let error = link.beat(&report("a")).expect_err("refused");
        let text = hecaton_node::with_causes(&error);
        assert!(text.contains("it is revoked"), "{text}");
        // A new certificate, in the same place, is taken up by the link.
        cluster.issue("a", Role::Node, 1);
        link.beat(&report("a")).expect("taken");
    }

    #[test]
    fn a_page_may_come_by_a_name_that_the_certificate_has() {
        let cluster = Cluster::start();
        let agent = cluster.agent("root", Role::Admin);
        let lift = |host: &str, origin: &str| {
            let lift = agent.delete(format!("{}/v1/policy", cluster.url())).header("host", host);
            let lift = lift.header("origin", origin).header("content-type", "application/json");
            lift.call().expect("answered").status().as_u16()
        };
        let own = ("manager.example:7070", "https://manager.example:7070");
        assert_eq!(lift(own.0, own.1), 421, "the certificate does not have it yet");
        cluster.issue_manager(&["manager.example"]);
        assert_eq!(lift(own.0, own.1), 204);
        assert_eq!(lift(own.0, "https://evil.example"), 403);
        assert_eq!(lift("evil.example", "https://evil.example"), 421);
    }

    /// Answer or error that a client gets with the credentials in `dir`, which may be invalid.
    fn heard_by(cluster: &Cluster, dir: &std::path::Path) -> String {
        use tokio_rustls::rustls::pki_types::pem::PemObject as _;
        use tokio_rustls::rustls::pki_types::{PrivateKeyDer, ServerName};
        use tokio_rustls::rustls::{ClientConfig, RootCertStore};
        let one = |name: &str| CertificateDer::from_pem_file(dir.join(name)).expect("PEM");
        let mut roots = RootCertStore::empty();
        roots.add(one("ca.pem")).expect("an authority");
        let key = PrivateKeyDer::from_pem_file(dir.join("key.pem")).expect("a key");
        let config = ClientConfig::builder()
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![one("cert.pem")], key)
            .expect("a configuration");
        let address = cluster.server.as_ref().expect("started").address();
        cluster.runtime.block_on(async {
            let stream = TcpStream::connect(address).await.expect("connected");
            let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
            let name = ServerName::try_from("127.0.0.1").expect("a name");
            let mut stream = connector.connect(name, stream).await.expect("its own part is done");
            let request = b"GET /v1/status HTTP/1.1\r\nHost: m\r\nConnection: close\r\n\r\n";
            let _ = stream.write_all(request).await;
            let mut answer = Vec::new();
            match stream.read_to_end(&mut answer).await {
                Ok(_) => String::from_utf8_lossy(&answer).into_owned(),
                Err(error) => error.to_string(),
            }
        })
    }

    #[test]
    fn who_is_refused_hears_why() {
        let cluster = Cluster::start();
        let over = cluster.issue("late", Role::Admin, 0);
        // It is good to the end of the second in which it was made.
        hecaton_testkit::wait_until_seen("the client hears that its certificate expired", || {
            let heard = heard_by(&cluster, &over);
            if heard.contains("CertificateExpired") { Ok(()) } else { Err(heard) }
        });
        let other = cluster.issue("m2", Role::Manager, 1);
        let heard = heard_by(&cluster, &other);
        assert!(
            heard.contains("UnsupportedCertificate") || heard.contains("BadCertificate"),
            "{heard}"
        );
        let plain = ureq::get(cluster.url().replace("https", "http"))
            .config()
            .http_status_as_error(false)
            .build()
            .call();
        let mut plain = plain.expect("answered");
        assert_eq!(plain.status(), 400);
        assert_eq!(plain.body_mut().read_to_string().expect("text"), PLAIN_REFUSAL);
        // A silent client delays no other client.
        let address = cluster.server.as_ref().expect("started").address();
        let _silent = std::net::TcpStream::connect(address).expect("connected");
        let status = cluster.agent("r", Role::ReadOnly).get(format!("{}/v1/status", cluster.url()));
        assert_eq!(status.call().expect("answered").status(), 200);
    }
}
