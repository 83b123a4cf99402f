//! Binds routes to an address and serves them until told to stop.

use crate::dashboard;
use crate::etcd::{Campaign, Seat};
use crate::http::api::Manager;
use crate::http::tls::{Peer, TlsListener};
use crate::records::ledger::{Keep, Ledger};
use crate::records::store::{Store, StoreError};
use axum::Router;
use hecaton_node::children::limits;
use hecaton_pki::Credentials;
use rustix::io::Errno;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// Why nothing is served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Somebody else listens there.
    #[error("cannot listen on {address}: the port is in use; choose another one with {option}")]
    PortInUse {
        /// Where it should listen.
        address: SocketAddr,
        /// The option that says so.
        option: &'static str,
    },
    /// The address is not this host's, or the port is reserved.
    #[error("cannot listen on {address}")]
    Listen {
        /// Where it should listen.
        address: SocketAddr,
        /// Error of the system call.
        source: io::Error,
    },
    /// The registry cannot be had.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A thread cannot be started.
    #[error("cannot start the manager")]
    Thread(#[source] io::Error),
}

/// Serves some routes on an address.
#[derive(Debug)]
pub(crate) struct HttpServer {
    address: SocketAddr,
    serving: JoinHandle<io::Result<()>>,
}

impl HttpServer {
    /// Serves on `address`, which was chosen by `option`; with `credentials`, by TLS to those who
    /// have some of the same authority.
    pub(crate) async fn start(
        address: SocketAddr,
        option: &'static str,
        router: Router,
        credentials: Option<Arc<Credentials>>,
    ) -> Result<HttpServer, ServeError> {
        let fail = |source: io::Error| match Errno::from_io_error(&source) {
            Some(Errno::ADDRINUSE) => ServeError::PortInUse { address, option },
            _ => ServeError::Listen { address, source },
        };
        let listener = TcpListener::bind(address).await.map_err(fail)?;
        let address = listener.local_addr().map_err(fail)?;
        let service = router.into_make_service_with_connect_info::<Peer>();
        let serving = match credentials {
            None => tokio::spawn(async move { axum::serve(listener, service).await }),
            Some(credentials) => {
                let listener = TlsListener::new(listener, credentials).map_err(fail)?;
                tokio::spawn(async move { axum::serve(listener, service).await })
            }
        };
        Ok(HttpServer { address, serving })
    }

    /// Stops. Connections are cut: every request is a whole, and a client that keeps its
    /// connection open would be waited for without end.
    pub(crate) async fn stop(self) {
        self.serving.abort();
        // An error says that it was aborted.
        let _ = self.serving.await;
    }
}

/// A manager that serves.
#[derive(Debug)]
pub struct ManagerServer {
    server: HttpServer,
    scheme: &'static str,
    /// Where several managers take turns.
    campaign: Option<Campaign>,
}

impl ManagerServer {
    /// Serves on `address`; port 0 takes a free one. To be called within a tokio runtime of several
    /// threads. Without `credentials` everybody may do everything.
    pub async fn start(
        address: SocketAddr,
        keep: Keep,
        credentials: Option<Arc<Credentials>>,
    ) -> Result<ManagerServer, ServeError> {
        limits::raise();
        let mut seat = None;
        let ledger = match keep {
            Keep::InMemory => Ledger::in_memory(),
            Keep::In(dir) => {
                let (store, lasting) = Store::open(&dir)?;
                Ledger::in_file(store, lasting)?
            }
            Keep::Etcd(etcd) => {
                let taken = seat.insert(Arc::new(Seat::new(etcd)));
                Ledger::in_etcd(Arc::clone(taken))
            }
        };
        let manager = Manager::new(Arc::clone(&ledger), credentials.clone());
        let routes = manager.router(dashboard::routes(&manager));
        let certified = credentials.clone();
        let router = hecaton_web::guarded(routes, address, move |name| {
            certified.as_ref().is_some_and(|own| own.now().is_for(name))
        });
        let scheme = if credentials.is_some() { "https" } else { "http" };
        let server = HttpServer::start(address, "--listen", router, credentials).await?;
        // Nobody is to be sent to a manager that does not listen.
        let campaign = seat.map(|seat| Campaign::start(seat, ledger)).transpose();
        Ok(ManagerServer { server, scheme, campaign: campaign.map_err(ServeError::Thread)? })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.server.address
    }

    /// Its base URL.
    pub fn url(&self) -> String {
        format!("{}://{}", self.scheme, self.server.address)
    }

    /// Stops listening, and lets another manager lead if this one does.
    pub async fn stop(self) {
        self.server.stop().await;
        if let Some(campaign) = self.campaign {
            tokio::task::block_in_place(|| campaign.stop());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ClusterStatus;
    use hecaton_node::cluster::heartbeat::{HeartbeatError, ManagerLink};
    use hecaton_node::cluster::report::NodeReport;
    use hecaton_node::donors::DonorReport;

    fn report(name: &str, boot: u64) -> NodeReport {
        NodeReport {
            name: name.to_owned(),
            boot,
            location: Some("rack 7".to_owned()),
            pid: 1,
            ..NodeReport::default()
        }
    }

    /// Runs blocking clients against a real server.
    fn with_server(test: impl FnOnce(&str)) {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let address = ([127, 0, 0, 1], 0).into();
        let server =
            runtime.block_on(ManagerServer::start(address, Keep::InMemory, None)).expect("started");
        test(&server.url());
        runtime.block_on(server.stop());
    }

    #[test]
    fn an_order_that_was_taken_outlives_the_manager() {
        let state = tempfile::tempdir().expect("a directory");
        let donor = DonorReport { name: "d".to_owned(), ..DonorReport::default() };
        let report = NodeReport { donors: vec![donor], ..report("a", 1) };
        let mut epochs = Vec::new();
        for draining in [false, true] {
            let runtime = tokio::runtime::Runtime::new().expect("a runtime");
            let address = ([127, 0, 0, 1], 0).into();
            let started = ManagerServer::start(address, Keep::In(state.path().to_owned()), None);
            let server = runtime.block_on(started).expect("started");
            let answer = ManagerLink::new(&server.url(), None).beat(&report).expect("taken");
            assert_eq!(answer.draining == ["d"], draining);
            epochs.push(answer.epoch);
            // Taken, and the donor does not hear of it from this manager any more.
            let drain = ureq::post(format!("{}/v1/donors/d/drain", server.url()));
            assert_eq!(drain.send_empty().expect("taken").status(), 204);
        }
        assert_eq!(epochs, [1, 2]);
    }

    #[test]
    fn nodes_come_and_go_over_http() {
        with_server(|url| {
            let link = ManagerLink::new(url, None);
            link.beat(&report("a", 1)).expect("taken");
            let refused = link.beat(&report("a", 2));
            let Err(HeartbeatError::Refused { reason, .. }) = refused else {
                panic!("{refused:?}");
            };
            assert!(reason.contains("`a` is taken"), "{reason}");

            let status = || {
                let mut response = ureq::get(format!("{url}/v1/status")).call().expect("answered");
                response.body_mut().read_json::<ClusterStatus>().expect("a status")
            };
            assert_eq!(status().nodes[0].report.location.as_deref(), Some("rack 7"));
            link.farewell("a", 1).expect("taken");
            assert!(status().nodes.is_empty());
        });
    }

    #[test]
    fn metrics_are_served_as_openmetrics() {
        with_server(|url| {
            ManagerLink::new(url, None).beat(&report("a", 1)).expect("taken");
            let mut response = ureq::get(format!("{url}/metrics")).call().expect("answered");
            let kind = response.headers()["content-type"].to_str().expect("text").to_owned();
            assert!(kind.starts_with("application/openmetrics-text"), "{kind}");
            let text = response.body_mut().read_to_string().expect("text");
            assert!(text.ends_with("# EOF\n"), "{text}");
        });
    }

    #[test]
    fn what_is_no_request_is_refused() {
        with_server(|url| {
            let status = |response: Result<_, ureq::Error>| match response {
                Err(ureq::Error::StatusCode(status)) => status,
                other => panic!("{other:?}"),
            };
            assert_eq!(status(ureq::get(format!("{url}/v2/status")).call()), 404);
            let heartbeat = format!("{url}/v1/nodes/a/heartbeat");
            assert_eq!(status(ureq::post(&heartbeat).send_json(1)), 422);
            assert_eq!(status(ureq::post(&heartbeat).send_json(report("b", 1))), 409);
            let huge = "x".repeat(5 << 20);
            let response = ureq::post(&heartbeat).content_type("application/json").send(&huge);
            assert!(response.is_err());
        });
    }

    #[test]
    fn a_port_in_use_is_named() {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
        let address = taken.local_addr().expect("an address");
        let error = runtime
            .block_on(ManagerServer::start(address, Keep::InMemory, None))
            .expect_err("in use");
        assert!(matches!(error, ServeError::PortInUse { address: at, .. } if at == address));
    }
}
