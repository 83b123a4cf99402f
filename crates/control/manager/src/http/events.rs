//! The cluster as it goes: one look a second, for all who watch.
//!
//! | request | answer |
//! |---|---|
//! | `GET /v1/overview` | the latest [`Overview`](crate::watching::overview::Overview) |
//! | `GET /v1/history` | [`History`](crate::watching::watch::History): the last ten minutes |
//! | `GET /v1/events` | server-sent events `overview`, one a second, each a whole overview |
//!
//! An overview is made once, however many watch. Nothing is queued for a slow client: it gets the
//! latest one when it has taken the one before.

use crate::http::api::{Manager, Refusal};
use crate::watching::watch::{History, Watch};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use futures_util::{StreamExt as _, stream};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;
use tokio::sync::{Semaphore, watch};
use tokio::time::MissedTickBehavior;

/// Time between two looks.
const INTERVAL: Duration = Duration::from_secs(1);

/// Most clients that are sent events at a time.
pub const MAX_WATCHERS: usize = 32;

/// After so many events, ten minutes, a client asks anew: who may watch is looked at when it asks.
const MAX_EVENTS: usize = 600;

/// After so long a client that lost its connection comes back.
const RETRY: Duration = Duration::from_secs(2);

#[derive(Debug)]
struct Live {
    manager: Manager,
    watch: Mutex<Watch>,
    latest: watch::Sender<Arc<str>>,
    places: Arc<Semaphore>,
}

/// The routes, and the task that looks, which ends when they are dropped. To be called within a
/// tokio runtime.
pub(crate) fn router(manager: &Manager) -> Router {
    let live = Arc::new(Live {
        manager: manager.clone(),
        watch: Mutex::default(),
        latest: watch::Sender::new("".into()),
        places: Arc::new(Semaphore::new(MAX_WATCHERS)),
    });
    live.look();
    tokio::spawn(look_on(Arc::downgrade(&live)));
    Router::new()
        .route("/v1/overview", get(overview))
        .route("/v1/history", get(history))
        .route("/v1/events", get(events))
        .with_state(live)
}

impl Live {
    fn watch(&self) -> MutexGuard<'_, Watch> {
        self.watch.lock().expect("no thread panics with the watch")
    }

    fn look(&self) {
        let text = match self.manager.cluster_status() {
            Ok(status) => {
                let view = self.watch().look(status);
                serde_json::to_string(&view).expect("an overview is plain data")
            }
            // Another manager leads: there is nothing to show, and those who watch are sent away.
            Err(_) => String::new(),
        };
        self.latest.send_replace(text.into());
    }

    /// Fails if another manager leads; else there is something to show.
    fn check(&self) -> Result<(), Refusal> {
        self.manager.check_leads()?;
        if self.latest.borrow().is_empty() {
            self.look();
        }
        Ok(())
    }
}

async fn look_on(live: Weak<Live>) {
    let mut interval = tokio::time::interval(INTERVAL);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        match live.upgrade() {
            Some(live) => live.look(),
            None => return,
        }
    }
}

async fn overview(State(live): State<Arc<Live>>) -> Result<Response, Refusal> {
    live.check()?;
    let text = live.latest.borrow().to_string();
    Ok(([(header::CONTENT_TYPE, "application/json")], text).into_response())
}

async fn history(State(live): State<Arc<Live>>) -> Result<Json<History>, Refusal> {
    live.check()?;
    Ok(Json(live.watch().history()))
}

async fn events(State(live): State<Arc<Live>>) -> Result<Response, Refusal> {
    live.check()?;
    let Ok(place) = Arc::clone(&live.places).try_acquire_owned() else {
        let text = format!("{MAX_WATCHERS} clients watch already; try again later\n");
        return Ok((StatusCode::SERVICE_UNAVAILABLE, text).into_response());
    };
    let mut latest = live.latest.subscribe();
    // The first one goes out at once.
    latest.mark_changed();
    // The stream must not keep `live`, whose end is what ends it.
    drop(live);
    let events = stream::unfold((latest, place), |(mut latest, place)| async {
        latest.changed().await.ok()?;
        let text = Arc::clone(&latest.borrow_and_update());
        if text.is_empty() {
            return None;
        }
        let event = Event::default().event("overview").retry(RETRY).data(text);
        Some((Ok::<_, Infallible>(event), (latest, place)))
    });
    Ok(Sse::new(events.take(MAX_EVENTS)).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::server::ManagerServer;
    use crate::records::ledger::Keep;
    use crate::watching::overview::Overview;
    use hecaton_node::cluster::heartbeat::ManagerLink;
    use hecaton_node::cluster::report::NodeReport;
    use hecaton_testkit::{patience, wait_until_seen};
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::net::{SocketAddr, TcpStream};

    /// Blocking clients against a real server.
    fn with_server(test: impl FnOnce(SocketAddr, &str)) {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let server = ManagerServer::start(([127, 0, 0, 1], 0).into(), Keep::InMemory, None);
        let server = runtime.block_on(server).expect("started");
        test(server.address(), &server.url());
        runtime.block_on(server.stop());
    }

    /// Asks for something; the answer's status, and what follows it.
    fn ask(address: SocketAddr, request: &str, headers: &str) -> (u16, BufReader<TcpStream>) {
        let mut stream = TcpStream::connect(address).expect("connected");
        stream.set_read_timeout(Some(patience())).expect("set");
        write!(stream, "{request} HTTP/1.1\r\nHost: {address}\r\n{headers}\r\n").expect("written");
        let mut answer = BufReader::new(stream);
        let mut line = String::new();
        answer.read_line(&mut line).expect("answered");
        let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
        (status.unwrap_or_else(|| panic!("{line}")), answer)
    }

    fn next_overview(events: &mut BufReader<TcpStream>) -> Overview {
        loop {
            let mut line = String::new();
            assert!(events.read_line(&mut line).expect("read") > 0, "the stream has ended");
            if let Some(data) = line.strip_prefix("data: ") {
                return serde_json::from_str(data).expect("an overview");
            }
        }
    }

    fn report(name: &str) -> NodeReport {
        NodeReport { name: name.to_owned(), boot: 1, ..NodeReport::default() }
    }

    #[test]
    fn who_watches_is_told_each_second() {
        with_server(|address, url| {
            let (status, mut events) = ask(address, "GET /v1/events", "");
            assert_eq!(status, 200);
            assert!(next_overview(&mut events).hosts.is_empty(), "the first one comes at once");
            ManagerLink::new(url, None).beat(&report("a")).expect("taken");
            wait_until_seen("the node is told of", || {
                let hosts = next_overview(&mut events).hosts;
                let names: Vec<_> = hosts.iter().map(|host| host.name.as_str()).collect();
                if names.first() == Some(&"a") { Ok(()) } else { Err(format!("{names:?}")) }
            });
            let history = ureq::get(format!("{url}/v1/history")).call().expect("answered");
            let history: History = history.into_body().read_json().expect("a history");
            assert!(history.tick > 0);
        });
    }

    #[test]
    fn those_who_watch_are_bounded_and_make_room_when_they_go() {
        with_server(|address, _| {
            let watch = || ask(address, "GET /v1/events", "");
            let mut watching: Vec<_> = (0..MAX_WATCHERS).map(|_| watch()).collect();
            assert!(watching.iter().all(|(status, _)| *status == 200));
            assert_eq!(watch().0, 503);
            watching.pop();
            // The server notices with one of its next events.
            wait_until_seen("there is room again", || match watch().0 {
                200 => Ok(()),
                status => Err(status),
            });
        });
    }

    #[test]
    fn other_sites_pages_reach_nothing() {
        with_server(|address, _| {
            let elsewhere = "Origin: http://evil.example\r\nContent-Type: text/plain\r\n";
            assert_eq!(ask(address, "POST /v1/donors/d/drain", elsewhere).0, 403);
            let own = format!("Origin: http://{address}\r\nContent-Type: application/json\r\n");
            assert_eq!(ask(address, "POST /v1/donors/d/drain", &own).0, 404, "it is let in");
            assert_eq!(ask(address, "GET /v1/status", "").0, 200);
            let mut stream = TcpStream::connect(address).expect("connected");
            write!(stream, "GET /v1/status HTTP/1.1\r\nHost: evil.example\r\n\r\n")
                .expect("written");
            let mut line = String::new();
            BufReader::new(stream).read_line(&mut line).expect("answered");
            assert!(line.contains("421"), "{line}");
        });
    }

    #[test]
    fn the_page_and_its_files_come_with_a_policy() {
        with_server(|_, url| {
            for (path, kind) in [("/", "text/html"), ("/dashboard/app.js", "text/javascript")] {
                let answer = ureq::get(format!("{url}{path}")).call().expect("answered");
                let header = |name: &str| answer.headers()[name].to_str().expect("text").to_owned();
                assert!(header("content-type").starts_with(kind));
                assert!(header("content-security-policy").starts_with("default-src 'none'"));
                assert_eq!(header("x-content-type-options"), "nosniff");
            }
            let missing = ureq::get(format!("{url}/dashboard/x.js")).call();
            assert!(matches!(missing, Err(ureq::Error::StatusCode(404))), "{missing:?}");
        });
    }
}
