//! How commands find their cluster: `--manager`, else `HECATON_MANAGER`, else the directory where
//! `hecaton dev` or `hecaton node` wrote where the manager is.

use crate::terminal::failure::usage;
use crate::tls::TlsArgs;
use anyhow::{Context as _, anyhow, bail};
use hecaton_manager::ClusterStatus;
use hecaton_memory::Size;
use hecaton_node::NodePaths;
use hecaton_node::cluster::endpoints::{Endpoints, Tried, check_urls};
use hecaton_node::cluster::report::Host;
use hecaton_node::socket::client::NodeClient;
use hecaton_pki::Credentials;
use hecaton_policy::cluster::choice::Choice;
use serde::de::DeserializeOwned;
use std::cell::Cell;
use std::env;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use ureq::http::header::RETRY_AFTER;
use ureq::http::{HeaderValue, Request, Response, StatusCode};
use ureq::middleware::MiddlewareNext;
use ureq::{Body, SendBody};

/// The variable that names the manager.
const MANAGER_VARIABLE: &str = "HECATON_MANAGER";

/// How long a manager may take to answer if the cluster has no other one: its host may be busy.
const PATIENCE: Duration = Duration::from_secs(20);

/// How long a manager may take to answer if the command can ask another one.
const PATIENCE_WITH_OTHERS: Duration = Duration::from_secs(5);

/// How long a command goes on trying while no manager leads: twice the time in which another one
/// does when the one that led has died.
const ELECTION_PATIENCE: Duration = Duration::from_secs(15);

/// How long a command goes on trying while the manager says that it has taken the order, and writes
/// it. A busy disk took 22 s.
const WRITE_PATIENCE: Duration = Duration::from_secs(120);

/// How long a manager is to wait for its write before it says that. The next request waits for the
/// same write.
const WRITE_WAIT: &str = "wait=2";

/// Time between two tries.
const ELECTION_INTERVAL: Duration = Duration::from_millis(500);

/// Longest refusal that is read.
const MAX_REFUSAL_BYTES: u64 = 4 << 10;

/// Longest status that is read.
const MAX_STATUS_BYTES: u64 = 256 << 20;

/// Which cluster is meant.
#[derive(clap::Args)]
pub(crate) struct ClusterArgs {
    /// The manager of the cluster, such as http://127.0.0.1:7070; of several, all, with commas
    /// between
    #[arg(long, value_name = "URL,...")]
    manager: Option<String>,
    /// The directory of the node on this host
    #[arg(long, value_name = "DIR", conflicts_with = "manager")]
    dir: Option<PathBuf>,
    #[command(flatten)]
    tls: TlsArgs,
}

/// Arguments of commands that list what a node has.
#[derive(clap::Args)]
pub(crate) struct ListArgs {
    /// Prints one JSON array
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) cluster: ClusterArgs,
}

/// A manager's base URL, or those of several, and where they were found.
#[derive(Debug)]
pub(crate) struct Manager {
    /// As it was written.
    pub(crate) url: String,
    managers: Endpoints,
    origin: String,
    credentials: Option<Arc<Credentials>>,
}

/// Why one manager has not done what it was asked.
enum Unanswered {
    /// It will not.
    Refused(anyhow::Error),
    /// It cannot; another one may.
    Away(anyhow::Error),
    /// Another one leads, or none does yet.
    NotLeading(anyhow::Error),
    /// It has done it, and not written it yet.
    Unwritten(anyhow::Error),
}

impl ClusterArgs {
    /// The manager, if anything names one.
    pub(crate) fn manager(&self) -> anyhow::Result<Option<Manager>> {
        if let Some(url) = &self.manager {
            return Manager::new(url, "--manager".to_owned(), &self.tls).map(Some);
        }
        // A directory that was named counts more than the environment.
        let variable = env::var(MANAGER_VARIABLE).ok().filter(|url| !url.is_empty());
        if let (Some(url), None) = (variable, &self.dir) {
            return Manager::new(&url, MANAGER_VARIABLE.to_owned(), &self.tls).map(Some);
        }
        let paths = self.paths();
        let file = paths.manager_file();
        let read = paths.read_manager_file();
        let read = read.with_context(|| format!("cannot read {}", file.display()))?;
        let known = |url: &str| Manager::new(url, file.display().to_string(), &self.tls);
        read.map(|found| known(&found.url)).transpose()
    }

    /// The manager; fails if nothing names one.
    pub(crate) fn need_manager(&self) -> anyhow::Result<Manager> {
        if let Some(manager) = self.manager()? {
            return Ok(manager);
        }
        if self.paths().control_socket().exists() {
            bail!("the node in {} has no manager, and this needs one", self.dir().display());
        }
        bail!("{}", self.none_found())
    }

    /// The node on this host through which the cluster is reached; `None` if there is no cluster.
    pub(crate) fn local_node(&self) -> anyhow::Result<Option<NodeClient>> {
        let named = self.manager.is_some()
            || (self.dir.is_none() && env::var_os(MANAGER_VARIABLE).is_some_and(|v| !v.is_empty()));
        if named {
            return self.need_manager()?.local_node().map(Some);
        }
        let socket = self.paths().control_socket();
        match NodeClient::connect(&socket) {
            Ok(client) => Ok(Some(client)),
            // No node was here, or one was killed.
            Err(error)
                if self.dir.is_none()
                    && matches!(
                        error.kind(),
                        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                    ) =>
            {
                Ok(None)
            }
            Err(error) => Err(error).with_context(|| {
                format!("no node answers at {}; is it running?", socket.display())
            }),
        }
    }

    /// The node on this host; fails if there is no cluster.
    pub(crate) fn need_local_node(&self) -> anyhow::Result<NodeClient> {
        self.local_node()?.with_context(|| self.none_found())
    }

    fn none_found(&self) -> String {
        format!(
            "there is no cluster in {}; start one with `hecaton dev`, or name one with --manager URL",
            self.dir().display()
        )
    }

    /// The directory that is looked at when no manager is named.
    pub(crate) fn dir(&self) -> PathBuf {
        self.dir.clone().unwrap_or_else(NodePaths::default_dir)
    }

    fn paths(&self) -> NodePaths {
        NodePaths::new(self.dir())
    }
}

impl Manager {
    fn new(url: &str, origin: String, tls: &TlsArgs) -> anyhow::Result<Manager> {
        check_url(url, &origin)?;
        let credentials = tls.for_url(url)?;
        let url = url.trim_end_matches('/').to_owned();
        Ok(Manager { managers: Endpoints::new(&url), url, origin, credentials })
    }

    /// Asks for the state of the cluster.
    pub(crate) fn status(&self) -> anyhow::Result<ClusterStatus> {
        self.get("v1/status")
    }

    /// Asks for what is at `path`.
    pub(crate) fn get<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        let mut response = self.ask(|agent, url| agent.get(format!("{url}/{path}")).call())?;
        let read = response.body_mut().with_config().limit(MAX_STATUS_BYTES).read_json();
        read.map_err(|error| self.unreachable(&self.url, &error))
    }

    /// Has a donor drain, or lend again.
    pub(crate) fn drain(&self, donor: &str, draining: bool) -> anyhow::Result<()> {
        let path = format!("v1/donors/{donor}/drain");
        let asked = self.ask(|agent, url| match draining {
            true => agent.post(format!("{url}/{path}")).send_empty(),
            false => agent.delete(format!("{url}/{path}")).call(),
        });
        asked.map(drop)
    }

    /// Has a node forgotten that is gone.
    pub(crate) fn remove(&self, node: &str) -> anyhow::Result<()> {
        let path = format!("v1/nodes/{node}/remove");
        let was_taken = Cell::new(false);
        let asked = self.ask(|agent, url| {
            let mut answer = agent.post(format!("{url}/{path}")).send_empty()?;
            match answer.status() {
                StatusCode::GATEWAY_TIMEOUT => was_taken.set(true),
                // It was forgotten when it was asked before, and that is written now.
                StatusCode::NOT_FOUND if was_taken.get() => {
                    *answer.status_mut() = StatusCode::NO_CONTENT;
                }
                _ => {}
            }
            Ok(answer)
        });
        asked.map(drop)
    }

    /// Has a donor lend no more than so many bytes, or again all that it has.
    pub(crate) fn limit(&self, donor: &str, limit: Option<Size>) -> anyhow::Result<()> {
        let path = format!("v1/donors/{donor}/limit");
        let asked = self.ask(|agent, url| match limit {
            Some(Size(bytes)) => agent.put(format!("{url}/{path}?bytes={bytes}")).send_empty(),
            None => agent.delete(format!("{url}/{path}")).call(),
        });
        asked.map(drop)
    }

    /// Has the pool divided by a policy, or by none.
    pub(crate) fn choose(&self, choice: Option<Choice>) -> anyhow::Result<()> {
        let asked = self.ask(|agent, url| match &choice {
            Some(choice) => agent.put(format!("{url}/v1/policy")).send_json(choice),
            None => agent.delete(format!("{url}/v1/policy")).call(),
        });
        asked.map(drop)
    }

    /// Has the cluster have no more harvest VMs than so many, or as many as hosts have room for.
    pub(crate) fn set_harvest_quota(&self, quota: Option<u64>) -> anyhow::Result<()> {
        let path = "v1/harvest-quota";
        let asked = self.ask(|agent, url| match quota {
            Some(most) => agent.put(format!("{url}/{path}?machines={most}")).send_empty(),
            None => agent.delete(format!("{url}/{path}")).call(),
        });
        asked.map(drop)
    }

    /// The answer of the manager that leads, unless it is a refusal. While managers answer that
    /// none of them leads, or not yet, or that the one that does is still writing, they are asked
    /// again: whatever is asked may be asked twice.
    fn ask(
        &self,
        send: impl Fn(&ureq::Agent, &str) -> Result<Response<Body>, ureq::Error>,
    ) -> anyhow::Result<Response<Body>> {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(patience(self.managers.count())))
            .http_status_as_error(false)
            .middleware(prefer_to_wait)
            .build();
        let agent = hecaton_pki::agent(config, self.credentials.clone());
        let begun = Instant::now();
        let mut is_announced = false;
        // A round without an answer, after one that met an election, ends no wait for a leader.
        let mut elects = Duration::ZERO;
        loop {
            let mut limit = elects;
            let answer = self.managers.ask(|url| match self.ask_one(url, &agent, &send) {
                Ok(response) => Tried::Answer(Ok(response)),
                Err(Unanswered::Refused(error)) => {
                    limit = Duration::ZERO;
                    Tried::Answer(Err(error))
                }
                Err(Unanswered::Away(error)) => Tried::Next(Err(error)),
                Err(Unanswered::NotLeading(error)) => {
                    elects = ELECTION_PATIENCE;
                    limit = limit.max(elects);
                    Tried::Next(Err(error))
                }
                Err(Unanswered::Unwritten(error)) => {
                    limit = WRITE_PATIENCE;
                    Tried::Answer(Err(error))
                }
            });
            if answer.is_ok() || begun.elapsed() > limit {
                return answer;
            }
            if limit < WRITE_PATIENCE {
                // Nothing tells a command that a manager leads.
                thread::sleep(ELECTION_INTERVAL);
            } else if !is_announced {
                is_announced = true;
                eprintln!(
                    "hecaton: the manager has taken this, and its registry takes long to write; \
                     waiting for up to {} s",
                    WRITE_PATIENCE.as_secs()
                );
            }
        }
    }

    fn ask_one(
        &self,
        url: &str,
        agent: &ureq::Agent,
        send: impl Fn(&ureq::Agent, &str) -> Result<Response<Body>, ureq::Error>,
    ) -> Result<Response<Body>, Unanswered> {
        let sent = send(agent, url);
        let mut response = sent.map_err(|error| Unanswered::Away(self.unreachable(url, &error)))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let text = response.body_mut().with_config().limit(MAX_REFUSAL_BYTES).read_to_string();
        let text = text.unwrap_or_else(|_| response.status().to_string());
        let refusal = anyhow!("the manager at {url} refuses: {}", text.trim_end());
        Err(match response.status() {
            StatusCode::SERVICE_UNAVAILABLE if response.headers().contains_key(RETRY_AFTER) => {
                Unanswered::NotLeading(refusal)
            }
            StatusCode::GATEWAY_TIMEOUT if response.headers().contains_key(RETRY_AFTER) => {
                Unanswered::Unwritten(refusal)
            }
            // It cannot write its registry.
            StatusCode::SERVICE_UNAVAILABLE => Unanswered::Away(refusal),
            _ => Unanswered::Refused(refusal),
        })
    }

    fn unreachable(&self, url: &str, error: &ureq::Error) -> anyhow::Error {
        anyhow!(
            "no manager answers at {url} (from {}): {error}; start one with `hecaton dev` or \
             `hecaton manager`, or name another one with --manager",
            self.origin
        )
    }

    /// A node of the cluster that runs on this host.
    fn local_node(&self) -> anyhow::Result<NodeClient> {
        let status = self.status()?;
        let here = Host::here().context("cannot read /proc")?;
        let local = status.nodes.iter().filter(|node| node.report.host.boot_id == here.boot_id);
        for node in local {
            match NodeClient::connect(&node.report.control_socket) {
                Ok(client) => return Ok(client),
                Err(error) => {
                    let socket = node.report.control_socket.display();
                    tracing::debug!(node = node.report.name, %socket, %error, "not usable");
                }
            }
        }
        bail!(
            "the cluster of {} has no node on this host that user {} may use; start one with \
             `hecaton node --manager {}`",
            self.url,
            rustix::process::geteuid().as_raw(),
            self.url
        )
    }
}

/// Says with each request how long the answer may wait for the manager's disk.
fn prefer_to_wait(
    mut request: Request<SendBody<'_>>,
    next: MiddlewareNext<'_>,
) -> Result<Response<Body>, ureq::Error> {
    request.headers_mut().insert("prefer", HeaderValue::from_static(WRITE_WAIT));
    next.handle(request)
}

/// How long one of so many managers may take to answer.
fn patience(managers: usize) -> Duration {
    if managers > 1 { PATIENCE_WITH_OTHERS } else { PATIENCE }
}

/// Refuses what cannot be a manager's URL, or several with a comma between any two.
pub(crate) fn check_url(urls: &str, origin: &str) -> anyhow::Result<()> {
    if let Err(error) = check_urls(urls, &["http", "https"]) {
        usage!("{origin}: {error}");
    }
    Ok(())
}

/// The manager that a node is told of: `--manager`, else `HECATON_MANAGER`. One that announces what
/// it lends may do without.
pub(crate) fn manager_for_node(
    option: Option<String>,
    announces: bool,
) -> anyhow::Result<Option<String>> {
    let Some(url) = option.or_else(|| env::var(MANAGER_VARIABLE).ok()) else {
        if announces {
            return Ok(None);
        }
        usage!(
            "the node needs a manager: give --manager URL or set {MANAGER_VARIABLE}, or let it find \
             donors with --announce"
        );
    };
    check_url(&url, "--manager")?;
    Ok(Some(url))
}

/// The directory that is meant.
pub(crate) fn dir_or_default(dir: Option<&Path>) -> PathBuf {
    dir.map_or_else(NodePaths::default_dir, Path::to_path_buf)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_waits_for_the_only_manager_longer() {
        assert_eq!(patience(Endpoints::new("http://a:1").count()), PATIENCE);
        let several = Endpoints::new("http://a:1,http://b:1,http://c:1");
        assert_eq!(patience(several.count()), PATIENCE_WITH_OTHERS);
    }
}
