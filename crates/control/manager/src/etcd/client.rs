//! Requests to etcd's JSON gateway, and which of its members is asked.

use crate::records::election::Term;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use hecaton_node::cluster::endpoints::{Endpoints, Tried};
use hecaton_pki::{LastingAgent, OutsideCredentials};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// How long one member may take to answer. All of three may be asked within a lease.
const PATIENCE: Duration = Duration::from_millis(1200);

/// Longest answer: all records of the most nodes.
const MAX_ANSWER_BYTES: u64 = 64 << 20;

/// Most operations of one transaction; etcd itself takes 128.
pub(super) const MAX_OPERATIONS: usize = 100;

/// Why etcd has not done what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// No member answers.
    #[error("no member of etcd answers at {members}: {reason}")]
    Unreachable {
        /// Addresses of the members.
        members: String,
        /// Error of the last member that was asked.
        reason: String,
    },
    /// It refuses.
    #[error("etcd refuses: {0}")]
    Refused(String),
    /// It says something else than etcd does.
    #[error("what answers is not etcd of version 3.4 or later: {0}")]
    Strange(String),
    /// Another manager leads.
    #[error("another manager leads since; this one's change was not written")]
    Superseded,
    /// Others came before it each time.
    #[error("earlier writes of this manager keep landing before this one; it is tried again")]
    Overtaken,
    /// The data in etcd were not written by a manager.
    #[error(
        "the registry in etcd is damaged: {0}; delete what is under its key and start the managers again"
    )]
    Damaged(String),
    /// A later version wrote it.
    #[error("the registry in etcd is of format {found}, and this version reads up to {known}")]
    Format {
        /// Format of the stored data.
        found: u64,
        /// Latest format that this version reads.
        known: u64,
    },
}

/// A key with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) value: Vec<u8>,
    pub(super) made_at: Term,
}

/// A change of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Put(String, Vec<u8>),
    Delete(String),
}

#[derive(Debug)]
pub(super) struct Client {
    members: Endpoints,
    /// In a box for its size.
    http: Box<LastingAgent<OutsideCredentials>>,
}

#[derive(Deserialize)]
struct Refusal {
    error: String,
}

#[derive(Deserialize)]
struct Lease {
    #[serde(rename = "ID")]
    id: Option<String>,
    #[serde(rename = "TTL", default)]
    ttl: Option<String>,
}

#[derive(Deserialize)]
struct Kept {
    result: Lease,
}

#[derive(Deserialize)]
struct Range {
    #[serde(default)]
    kvs: Vec<KeyValue>,
}

#[derive(Deserialize)]
struct KeyValue {
    key: String,
    #[serde(default)]
    value: String,
    create_revision: String,
}

#[derive(Deserialize)]
struct Transaction {
    #[serde(default)]
    succeeded: bool,
    #[serde(default)]
    responses: Vec<Response>,
    header: Header,
}

#[derive(Deserialize)]
struct Response {
    response_range: Option<Range>,
}

#[derive(Deserialize)]
struct Header {
    revision: String,
}

impl Client {
    pub(super) fn new(members: &str, credentials: Option<Arc<OutsideCredentials>>) -> Client {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(PATIENCE))
            .http_status_as_error(false)
            .build();
        let http = Box::new(LastingAgent::new(config, credentials));
        Client { members: Endpoints::new(members), http }
    }

    /// A lease of so many seconds.
    pub(super) fn grant(&self, seconds: u64) -> Result<String, EtcdError> {
        let lease: Lease = self.ask("lease/grant", &json!({ "TTL": seconds.to_string() }))?;
        lease.id.ok_or_else(|| strange("a lease without a number"))
    }

    /// Whether the lease still lives; it begins anew then.
    pub(super) fn keep_alive(&self, lease: &str) -> Result<bool, EtcdError> {
        let kept: Kept = self.ask("lease/keepalive", &json!({ "ID": lease }))?;
        Ok(kept.result.ttl.is_some_and(|ttl| ttl != "0"))
    }

    /// Ends a lease, and with it what was written under it.
    pub(super) fn revoke(&self, lease: &str) -> Result<(), EtcdError> {
        self.ask::<Value>("lease/revoke", &json!({ "ID": lease })).map(|_| ())
    }

    pub(super) fn get(&self, key: &str) -> Result<Option<Entry>, EtcdError> {
        let range: Range = self.ask("kv/range", &json!({ "key": encoded(key) }))?;
        Ok(entries(range)?.pop())
    }

    /// All keys that begin so.
    pub(super) fn list(&self, prefix: &str) -> Result<Vec<Entry>, EtcdError> {
        let mut end = prefix.as_bytes().to_vec();
        *end.last_mut().expect("a prefix is not empty") += 1;
        let range = json!({ "key": encoded(prefix), "range_end": encoded(end) });
        let range: Range = self.ask("kv/range", &range)?;
        entries(range)
    }

    /// Makes a key that goes with the lease. If it is there already, that is the answer.
    pub(super) fn make(
        &self,
        key: &str,
        value: &[u8],
        lease: &str,
    ) -> Result<Result<Term, Option<Entry>>, EtcdError> {
        let (key, value) = (encoded(key), encoded(value));
        let transaction = json!({
            "compare": [{ "key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0" }],
            "success": [{ "request_put": { "key": key, "value": value, "lease": lease } }],
            "failure": [{ "request_range": { "key": key } }],
        });
        let done: Transaction = self.ask("kv/txn", &transaction)?;
        if done.succeeded {
            return Ok(Ok(number(&done.header.revision).map(Term)?));
        }
        let range = done.responses.into_iter().find_map(|response| response.response_range);
        let entries = range.map(entries).transpose()?;
        Ok(Err(entries.and_then(|mut entries| entries.pop())))
    }

    /// Does all, if the key is still the one that was made at that term and the other one has that
    /// value, or is not there; says whether it was so.
    pub(super) fn change(
        &self,
        (key, term): (&str, Term),
        (other, value): (&str, Option<&str>),
        operations: &[Operation],
    ) -> Result<bool, EtcdError> {
        let operations = operations.iter().map(|operation| match operation {
            Operation::Put(key, value) => {
                json!({ "request_put": { "key": encoded(key), "value": encoded(value) } })
            }
            Operation::Delete(key) => json!({ "request_delete_range": { "key": encoded(key) } }),
        });
        let other = encoded(other);
        let is_as_before = match value {
            Some(value) => json!({
                "key": other, "target": "VALUE", "result": "EQUAL", "value": encoded(value),
            }),
            None => json!({ "key": other, "target": "VERSION", "result": "EQUAL", "version": "0" }),
        };
        let is_term = json!({
            "key": encoded(key), "target": "CREATE", "result": "EQUAL",
            "create_revision": term.0.to_string(),
        });
        let transaction = json!({
            "compare": [is_term, is_as_before],
            "success": operations.collect::<Vec<_>>(),
        });
        Ok(self.ask::<Transaction>("kv/txn", &transaction)?.succeeded)
    }

    /// Asks the member that answered last, then the others. A request that was heard and not
    /// answered is repeated: all of them may be done twice.
    fn ask<T: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<T, EtcdError> {
        self.members.ask(|member| match self.ask_member(member, path, body) {
            Ok(answer) => Tried::Answer(Ok(answer)),
            Err(Failure::Member(reason)) => {
                let members = self.members.to_string();
                Tried::Next(Err(EtcdError::Unreachable { members, reason }))
            }
            Err(Failure::Etcd(error)) => Tried::Answer(Err(error)),
        })
    }

    fn ask_member<T: DeserializeOwned>(
        &self,
        member: &str,
        path: &str,
        body: &Value,
    ) -> Result<T, Failure> {
        let away = |error: ureq::Error| Failure::Member(error.to_string());
        let mut response =
            self.http.now().post(format!("{member}/v3/{path}")).send_json(body).map_err(away)?;
        let status = response.status();
        let text = response.body_mut().with_config().limit(MAX_ANSWER_BYTES).read_to_vec();
        let text = text.map_err(away)?;
        if status.is_success() {
            return serde_json::from_slice(&text)
                .map_err(|error| Failure::Etcd(EtcdError::Strange(error.to_string())));
        }
        match serde_json::from_slice::<Refusal>(&text) {
            // A member without a majority says so, and another one may have it.
            Ok(refusal) if status.is_server_error() => Err(Failure::Member(refusal.error)),
            Ok(refusal) => Err(Failure::Etcd(EtcdError::Refused(refusal.error))),
            Err(_) => {
                Err(Failure::Etcd(EtcdError::Strange(format!("{member}: HTTP status {status}"))))
            }
        }
    }
}

/// Whether another member may still answer the request.
enum Failure {
    /// The member's: another one may do better.
    Member(String),
    Etcd(EtcdError),
}

fn entries(range: Range) -> Result<Vec<Entry>, EtcdError> {
    let decode = |text: &str| BASE64_STANDARD.decode(text).map_err(strange);
    let entry = |pair: KeyValue| {
        let key = String::from_utf8(decode(&pair.key)?).map_err(strange)?;
        let made_at = number(&pair.create_revision).map(Term)?;
        Ok(Entry { key, value: decode(&pair.value)?, made_at })
    };
    range.kvs.into_iter().map(entry).collect()
}

fn number(text: &str) -> Result<u64, EtcdError> {
    text.parse().map_err(strange)
}

fn strange(reason: impl std::fmt::Display) -> EtcdError {
    EtcdError::Strange(reason.to_string())
}

fn encoded(bytes: impl AsRef<[u8]>) -> String {
    BASE64_STANDARD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_does_not_answer_is_named() {
        let free = format!("127.0.0.1:{}", hecaton_testkit::unused_port());
        let client = Client::new(&format!("http://{free}"), None);
        let error = client.get("a").unwrap_err().to_string();
        assert!(error.contains(&free), "{error}");
    }
}
