//! One of several managers: it campaigns until it leads, and leads until it cannot renew its lease.

use super::EtcdError;
use super::store::{Etcd, LEASE};
use crate::records::election::{Election, Heard, Term, Turn};
use crate::records::lasting::Changes;
use crate::records::ledger::Ledger;
use crate::registry::Registry;
use hecaton_node::stop::Stop;
use hecaton_node::with_causes;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Time between two questions to etcd: several within a lease.
const INTERVAL: Duration = LEASE.checked_div(5).expect("five is not zero");

/// One manager's access to etcd, and its state in the election.
#[derive(Debug)]
pub(crate) struct Seat {
    etcd: Etcd,
    election: Mutex<Election>,
    /// The election's clock, which goes on while the process is stopped.
    begun: Instant,
}

/// The thread that campaigns.
#[derive(Debug)]
pub(crate) struct Campaign {
    stop: Arc<Stop>,
    thread: JoinHandle<()>,
}

impl Seat {
    pub(crate) fn new(etcd: Etcd) -> Seat {
        let election = Mutex::new(Election::new(LEASE));
        Seat { etcd, election, begun: Instant::now() }
    }

    /// The term, if this manager leads at this moment.
    pub(crate) fn term(&self) -> Option<Term> {
        self.election().leads(self.begun.elapsed())
    }

    /// Where the manager is that leads, if it is another one and known.
    pub(crate) fn leader(&self) -> Option<String> {
        let election = self.election();
        election.leader().filter(|url| *url != self.etcd.url()).map(str::to_owned)
    }

    pub(crate) fn write(&self, term: Term, changes: &Changes) -> Result<(), EtcdError> {
        self.etcd.write(term, changes)
    }

    fn election(&self) -> MutexGuard<'_, Election> {
        self.election.lock().expect("no thread panics with the election")
    }

    /// Asks etcd once, and takes the registry over if this manager has come to lead.
    fn turn(&self, ledger: &Ledger) -> Result<(), String> {
        let asked = self.begun.elapsed();
        let ask = self.election().next(asked);
        let answer = self.etcd.ask(ask);
        let (heard, trouble) = match answer {
            Ok(heard) => (heard, None),
            Err(error) => (Heard::Silence, Some(with_causes(&error))),
        };
        let turn = self.election().hear(asked, self.begun.elapsed(), heard);
        match turn {
            Some(Turn::Lead(_)) => tracing::info!("this manager leads"),
            Some(Turn::Follow) => tracing::warn!("this manager leads no more"),
            None => {}
        }
        if let Some(trouble) = trouble {
            return Err(trouble);
        }
        let Some(term) = self.term() else { return Ok(()) };
        if ledger.term() == Some(term) {
            return Ok(());
        }
        let taken = self.registry_of(term);
        match taken {
            Ok(registry) => ledger.take_over(term, registry),
            Err(error) => {
                // Another manager may be able to.
                self.resign();
                return Err(with_causes(&error));
            }
        }
        Ok(())
    }

    /// Reads the registry that the previous leader left, and writes this term's epoch. Meanwhile
    /// requests are told at once that this manager does not lead yet.
    fn registry_of(&self, term: Term) -> Result<Registry, EtcdError> {
        let mut registry = Registry::new(self.etcd.read()?);
        self.etcd.write(term, registry.changes())?;
        registry.written();
        Ok(registry)
    }

    /// Leads no more, and then lets another manager lead at once.
    fn resign(&self) {
        let now = self.begun.elapsed();
        if self.election().hear(now, now, Heard::Gone) == Some(Turn::Follow) {
            tracing::info!("this manager leads no more: it has resigned");
        }
        self.etcd.resign();
    }
}

impl Campaign {
    pub(crate) fn start(seat: Arc<Seat>, ledger: Arc<Ledger>) -> io::Result<Campaign> {
        let stop = Arc::new(Stop::default());
        let thread = thread::Builder::new().name("campaign".into()).spawn({
            let stop = Arc::clone(&stop);
            move || {
                let mut trouble = None;
                loop {
                    let found = seat.turn(&ledger).err();
                    // Once for each kind of trouble, and not every second.
                    if let Some(text) = &found
                        && trouble.as_ref() != Some(text)
                    {
                        tracing::warn!("{text}; trying again each second");
                    }
                    trouble = found;
                    if stop.wait(INTERVAL) {
                        return seat.resign();
                    }
                }
            }
        })?;
        Ok(Campaign { stop, thread })
    }

    /// Ends it; another manager may lead at once.
    pub(crate) fn stop(self) {
        self.stop.set();
        let _ = self.thread.join();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine as _;
    use base64::prelude::BASE64_STANDARD;
    use hecaton_policy::cluster::choice::{Choice, Named};
    use serde_json::{Value, json};
    use std::collections::BTreeMap;
    use std::io::{BufRead as _, BufReader, Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};

    /// Content of a simulated etcd: keys with their values and creation revisions.
    #[derive(Default)]
    struct Kept {
        keys: BTreeMap<String, (String, u64)>,
        revision: u64,
        /// Changes of other keys than the leader's are answered with an error.
        refuses_changes: bool,
    }

    const LEADER: &str = "/hecaton/1/leader";

    impl Kept {
        /// Answers what a manager asks, as etcd's gateway does.
        fn answer(&mut self, path: &str, asked: &Value) -> Result<Value, &'static str> {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let leader = BASE64_STANDARD.encode(LEADER);
            Ok(match path {
                "/v3/lease/grant" => json!({ "ID": "1", "TTL": "5" }),
                "/v3/lease/keepalive" => json!({ "result": { "ID": "1", "TTL": "5" } }),
                "/v3/lease/revoke" => {
                    self.keys.remove(&leader);
                    json!({})
                }
                "/v3/kv/range" => {
                    let all = asked["range_end"].is_string();
                    let wanted = text(&asked["key"]);
                    let found = self.keys.iter().filter(|(key, _)| all || **key == wanted);
                    let shown = found.map(|(key, (value, made))| {
                        json!({ "key": key, "value": value, "create_revision": made.to_string() })
                    });
                    json!({ "kvs": shown.collect::<Vec<_>>() })
                }
                "/v3/kv/txn" => {
                    let makes_leader = asked["compare"][0]["create_revision"] == "0";
                    if self.refuses_changes && !makes_leader {
                        return Err("no space");
                    }
                    self.revision += 1;
                    let put = asked["success"].as_array().into_iter().flatten();
                    for put in put.map(|one| &one["request_put"]) {
                        let made = (text(&put["value"]), self.revision);
                        self.keys.insert(text(&put["key"]), made);
                    }
                    json!({
                        "succeeded": true,
                        "header": { "revision": self.revision.to_string() },
                    })
                }
                other => panic!("{other} is not asked of etcd"),
            })
        }
    }

    fn serve(stream: TcpStream, kept: &Mutex<Kept>) -> Option<()> {
        let mut reader = BufReader::new(stream.try_clone().ok()?);
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).ok().filter(|read| *read > 0)?;
            let path = line.split(' ').nth(1)?.to_owned();
            let mut length = 0;
            loop {
                let mut header = String::new();
                reader.read_line(&mut header).ok()?;
                let header = header.trim().to_ascii_lowercase();
                if header.is_empty() {
                    break;
                }
                if let Some(value) = header.strip_prefix("content-length:") {
                    length = value.trim().parse().ok()?;
                }
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).ok()?;
            let asked = serde_json::from_slice(&body).ok()?;
            let answer = kept.lock().unwrap().answer(&path, &asked);
            let (status, body) = match answer {
                Ok(answer) => ("200 OK", answer),
                Err(error) => ("400 Bad Request", json!({ "error": error })),
            };
            let body = body.to_string();
            let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n", body.len());
            (&stream).write_all((head + &body).as_bytes()).ok()?;
        }
    }

    /// An etcd with one member, for as long as the process lives.
    fn etcd() -> (String, Arc<Mutex<Kept>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let kept = Arc::new(Mutex::new(Kept::default()));
        thread::spawn({
            let kept = Arc::clone(&kept);
            move || {
                for stream in listener.incoming().flatten() {
                    let kept = Arc::clone(&kept);
                    thread::spawn(move || serve(stream, &kept));
                }
            }
        });
        (url, kept)
    }

    fn kept_as(kept: &Mutex<Kept>, name: &str) -> Option<String> {
        let key = BASE64_STANDARD.encode(format!("/hecaton/1/{name}"));
        let value = kept.lock().unwrap().keys.get(&key)?.0.clone();
        Some(String::from_utf8(BASE64_STANDARD.decode(value).unwrap()).unwrap())
    }

    fn epoch_kept(kept: &Mutex<Kept>) -> Option<String> {
        kept_as(kept, "epoch")
    }

    #[test]
    fn a_policy_of_a_later_version_keeps_nobody_from_leading_and_stays_as_it_is() {
        let (url, kept) = etcd();
        let seat = Arc::new(Seat::new(Etcd::new(&url, "http://a", None)));
        let ledger = Ledger::in_etcd(Arc::clone(&seat));
        let record = r#"{"policy":"fair", "spread":{"of":3}}"#;
        let policy = (BASE64_STANDARD.encode(record), 1);
        let key = BASE64_STANDARD.encode("/hecaton/1/policy");
        kept.lock().unwrap().keys.insert(key, policy);
        seat.turn(&ledger).expect("it leads");
        let status = ledger.see(|registry, now| registry.status(now)).expect("it leads");
        assert_eq!(status.policy, Some(Named::Unknown { policy: "fair".to_owned() }));
        assert_eq!(
            (epoch_kept(&kept).as_deref(), kept_as(&kept, "policy").as_deref()),
            (Some("1"), Some(record))
        );
        let choice = Choice::Anticipating {};
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let set = ledger.change(Duration::from_secs(60), |registry, _| {
            registry.choose(Some(choice));
            Ok::<_, ()>(())
        });
        runtime.block_on(set).expect("written").expect("not refused");
        assert_eq!(kept_as(&kept, "policy").as_deref(), Some(r#"{"policy":"anticipating"}"#));
    }

    #[test]
    fn who_cannot_write_its_epoch_answers_nobody_and_resigns() {
        let (url, kept) = etcd();
        let seat = Arc::new(Seat::new(Etcd::new(&url, "http://a", None)));
        let ledger = Ledger::in_etcd(Arc::clone(&seat));
        kept.lock().unwrap().refuses_changes = true;
        for _ in 0..2 {
            let trouble = seat.turn(&ledger).expect_err("it cannot write");
            assert!(trouble.contains("no space"), "{trouble}");
            assert_eq!((seat.term(), ledger.term()), (None, None));
            assert!(ledger.see(|_, _| ()).is_err(), "an epoch nobody has written");
            let leader = BASE64_STANDARD.encode(LEADER);
            assert!(!kept.lock().unwrap().keys.contains_key(&leader), "another one may lead");
        }
        assert_eq!(epoch_kept(&kept), None);

        kept.lock().unwrap().refuses_changes = false;
        seat.turn(&ledger).expect("it leads");
        assert_eq!(epoch_kept(&kept).as_deref(), Some("1"));
        assert_eq!(ledger.see(|registry, now| registry.status(now).epoch).unwrap(), 1);
        assert_eq!(ledger.term(), seat.term());
        seat.turn(&ledger).expect("it leads on");

        seat.resign();
        assert_eq!(seat.term(), None, "it does not wait for its lease to end");
        assert!(ledger.see(|_, _| ()).is_err());
        seat.turn(&ledger).expect("it leads again");
        assert_eq!(epoch_kept(&kept).as_deref(), Some("2"));
    }
}
