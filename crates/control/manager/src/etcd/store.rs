//! Campaigns in etcd, leads while the lease lives, and keeps the registry.

use super::PREFIX;
use super::client::{Client, Entry, EtcdError, MAX_OPERATIONS, Operation};
use crate::records::election::{Ask, Heard, Term};
use crate::records::lasting::{Changes, Lasting};
use crate::records::pen::{Pen, Stamp};
use hecaton_memory::random_u64;
use hecaton_pki::OutsideCredentials;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Time for which a manager leads without a renewal. After it dies, another manager leads at the
/// latest after this time and the interval between two requests to etcd.
pub const LEASE: Duration = Duration::from_secs(5);

/// Version of the stored format. Raise it when an older manager would misread the data.
const FORMAT: u64 = 1;

const LEADER: &str = "leader";
const NODE: &str = "node/";
const DRAINING: &str = "draining/";
const LIMIT: &str = "limit/";
const POLICY: &str = "policy";
const HARVEST_QUOTA: &str = "harvest-quota";
const HARVEST_RECORD: &str = "harvest-record/";
/// Stamp of the last write.
const STAMP: &str = "stamp";

/// Attempts at a write that other writes overtake. A read of the stamp counts as an attempt.
const ATTEMPTS: usize = 8;

/// Access of one manager to its cluster's etcd.
#[derive(Debug)]
pub struct Etcd {
    client: Client,
    /// Value of the leader's key while this manager leads: a random number and the manager's URL.
    name: String,
    url: String,
    lease: Mutex<Option<String>>,
    pen: Mutex<Pen>,
}

impl Etcd {
    /// Etcd with these members, for a manager that is reached at `url`. `credentials` are needed if
    /// the members speak TLS.
    pub fn new(members: &str, url: &str, credentials: Option<Arc<OutsideCredentials>>) -> Etcd {
        let name = format!("{:016x} {url}", random_u64());
        let (lease, pen) = Default::default();
        let client = Client::new(members, credentials);
        Etcd { client, name, url: url.to_owned(), lease, pen }
    }

    /// URL of this manager.
    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// Asks etcd the election's question.
    pub fn ask(&self, ask: Ask) -> Result<Heard, EtcdError> {
        match ask {
            Ask::Campaign => self.campaign(),
            Ask::Renew => self.renew(),
        }
    }

    fn campaign(&self) -> Result<Heard, EtcdError> {
        let key = key(LEADER);
        if let Some(leader) = self.client.get(&key)? {
            return Ok(Heard::Other(url_of(&leader)));
        }
        let lease = self.client.grant(LEASE.as_secs())?;
        match self.client.make(&key, self.name.as_bytes(), &lease)? {
            Ok(term) => {
                *self.lease() = Some(lease);
                Ok(Heard::Won(term))
            }
            // The first attempt made the key, and its answer was lost.
            Err(Some(leader)) if leader.value == self.name.as_bytes() => {
                *self.lease() = Some(lease);
                Ok(Heard::Won(leader.made_at))
            }
            Err(leader) => {
                // The lease would expire anyway.
                let _ = self.client.revoke(&lease);
                Ok(leader.map_or(Heard::Gone, |leader| Heard::Other(url_of(&leader))))
            }
        }
    }

    fn renew(&self) -> Result<Heard, EtcdError> {
        let Some(lease) = self.lease().clone() else { return Ok(Heard::Gone) };
        Ok(if self.client.keep_alive(&lease)? { Heard::Renewed } else { Heard::Gone })
    }

    /// Lets another manager lead at once.
    pub fn resign(&self) {
        if let Some(lease) = self.lease().take() {
            // Otherwise the lease expires, only later.
            let _ = self.client.revoke(&lease);
        }
    }

    /// Registry as the previous leader left it.
    pub fn read(&self) -> Result<Lasting, EtcdError> {
        let mut lasting = Lasting::default();
        for entry in self.client.list(PREFIX)? {
            let Some(name) = entry.key.strip_prefix(PREFIX) else { continue };
            if name == "format" {
                let found = number(&entry)?;
                if found > FORMAT {
                    return Err(EtcdError::Format { found, known: FORMAT });
                }
            } else if name == "epoch" {
                lasting.epoch = number(&entry)?;
            } else if let Some(node) = name.strip_prefix(NODE) {
                let record = serde_json::from_slice(&entry.value)
                    .map_err(|error| EtcdError::Damaged(format!("{}: {error}", entry.key)))?;
                lasting.nodes.insert(node.to_owned(), record);
            } else if let Some(donor) = name.strip_prefix(DRAINING) {
                lasting.draining.insert(donor.to_owned());
            } else if let Some(donor) = name.strip_prefix(LIMIT) {
                lasting.limits.insert(donor.to_owned(), number(&entry)?);
            } else if name == POLICY {
                let policy = serde_json::from_slice(&entry.value)
                    .map_err(|error| EtcdError::Damaged(format!("{}: {error}", entry.key)))?;
                lasting.policy = Some(policy);
            } else if name == HARVEST_QUOTA {
                lasting.harvest_quota = Some(number(&entry)?);
            } else if let Some(node) = name.strip_prefix(HARVEST_RECORD) {
                let record = serde_json::from_slice(&entry.value)
                    .map_err(|error| EtcdError::Damaged(format!("{}: {error}", entry.key)))?;
                lasting.harvest_records.insert(node.to_owned(), record);
            }
        }
        Ok(lasting)
    }

    /// Writes `changes`, if this manager's term is still the last one, and after all of its earlier
    /// writes: see [`Pen`]. Changes too large for one transaction are written in several. Each sets
    /// some things for good, and the rest stays to be written.
    pub fn write(&self, term: Term, changes: &Changes) -> Result<(), EtcdError> {
        // Held throughout: only one write at a time.
        let mut pen = self.pen.lock().expect("no thread panics with the pen");
        // The stamp takes one operation.
        for some in operations(changes).chunks(MAX_OPERATIONS - 1) {
            self.write_some(&mut pen, term, some)?;
        }
        Ok(())
    }

    fn write_some(&self, pen: &mut Pen, term: Term, some: &[Operation]) -> Result<(), EtcdError> {
        let (leader, stamp) = (key(LEADER), key(STAMP));
        for _ in 0..ATTEMPTS {
            let stroke = match pen.stroke(term) {
                Some(stroke) => stroke,
                None => {
                    let there = self.client.get(&stamp)?;
                    pen.found(there.as_ref().map(stamp_of).transpose()?);
                    continue;
                }
            };
            let after = stroke.after.map(|after| after.to_string());
            let leaves = Operation::Put(stamp.clone(), stroke.leaves.to_string().into_bytes());
            let operations: Vec<Operation> = some.iter().cloned().chain([leaves]).collect();
            let guard = (stamp.as_str(), after.as_deref());
            match self.client.change((&leader, term), guard, &operations) {
                Ok(true) => {
                    pen.taken(stroke);
                    return Ok(());
                }
                Ok(false) => pen.unsure(),
                Err(error) => {
                    pen.unsure();
                    return Err(error);
                }
            }
            // Either another manager leads, or an earlier write of this one has landed late.
            match self.client.get(&leader)? {
                Some(entry) if entry.made_at == term => {}
                _ => return Err(EtcdError::Superseded),
            }
        }
        Err(EtcdError::Overtaken)
    }

    fn lease(&self) -> std::sync::MutexGuard<'_, Option<String>> {
        self.lease.lock().expect("no thread panics with the lease")
    }
}

fn key(name: &str) -> String {
    format!("{PREFIX}{name}")
}

fn url_of(leader: &Entry) -> String {
    let name = String::from_utf8_lossy(&leader.value);
    name.split_once(' ').map_or_else(|| name.to_string(), |(_, url)| url.to_owned())
}

fn stamp_of(entry: &Entry) -> Result<Stamp, EtcdError> {
    let text = String::from_utf8_lossy(&entry.value);
    text.parse().map_err(|error| EtcdError::Damaged(format!("{}: {error}", entry.key)))
}

fn number(entry: &Entry) -> Result<u64, EtcdError> {
    let text = std::str::from_utf8(&entry.value).ok().and_then(|text| text.parse().ok());
    text.ok_or_else(|| EtcdError::Damaged(format!("{} is no number", entry.key)))
}

fn operations(changes: &Changes) -> Vec<Operation> {
    let number = |name: &str, value: u64| Operation::Put(key(name), value.to_string().into_bytes());
    let mut operations = vec![number("format", FORMAT)];
    operations.extend(changes.epoch.map(|epoch| number("epoch", epoch)));
    for (name, record) in &changes.nodes {
        let key = key(&format!("{NODE}{name}"));
        operations.push(match record {
            Some(record) => {
                let json = serde_json::to_vec(record).expect("names and numbers can be written");
                Operation::Put(key, json)
            }
            None => Operation::Delete(key),
        });
    }
    for (donor, draining) in &changes.draining {
        let key = key(&format!("{DRAINING}{donor}"));
        operations.push(match draining {
            true => Operation::Put(key, Vec::new()),
            false => Operation::Delete(key),
        });
    }
    for (donor, limit) in &changes.limits {
        let name = format!("{LIMIT}{donor}");
        operations.push(match limit {
            Some(bytes) => number(&name, *bytes),
            None => Operation::Delete(key(&name)),
        });
    }
    operations.extend(changes.policy.map(|choice| match choice {
        Some(choice) => {
            let json = serde_json::to_vec(&choice).expect("names and numbers can be written");
            Operation::Put(key(POLICY), json)
        }
        None => Operation::Delete(key(POLICY)),
    }));
    operations.extend(changes.harvest_quota.map(|quota| match quota {
        Some(quota) => number(HARVEST_QUOTA, quota),
        None => Operation::Delete(key(HARVEST_QUOTA)),
    }));
    for (name, record) in &changes.harvest_records {
        let key = key(&format!("{HARVEST_RECORD}{name}"));
        operations.push(match record {
            Some(record) => {
                let json = serde_json::to_vec(record).expect("numbers can be written");
                Operation::Put(key, json)
            }
            None => Operation::Delete(key),
        });
    }
    operations
}
