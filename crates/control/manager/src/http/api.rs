//! The HTTP API: JSON under `/v1`, metrics for Prometheus under `/metrics`.
//!
//! | request | body | answer |
//! |---|---|---|
//! | `GET /v1/status` | | [`ClusterStatus`](crate::ClusterStatus): nodes, donors and consumers |
//! | `GET /v1/donors` | | the donors of the nodes that are up |
//! | `POST /v1/donors/NAME/drain` | | nothing; the donor gives back all that it has lent |
//! | `DELETE /v1/donors/NAME/drain` | | nothing; it goes on lending |
//! | `PUT /v1/donors/NAME/limit?bytes=N` | | nothing; the donor lends at most N, recalls the rest |
//! | `DELETE /v1/donors/NAME/limit` | | nothing; it lends again all that it has |
//! | `POST /v1/nodes/NAME/heartbeat` | [`NodeReport`] | [`HeartbeatAnswer`] |
//! | `DELETE /v1/nodes/NAME?boot=N` | | nothing; the node says farewell |
//! | `POST /v1/nodes/NAME/remove` | | nothing; a node that is gone is forgotten |
//! | `PUT /v1/policy` | [`Choice`] | nothing; the pool is divided by it from now on |
//! | `DELETE /v1/policy` | | nothing; everybody may hold what it gets |
//! | `GET /v1/overview`, `/v1/history`, `/v1/events` | | see [`events`](crate::http::events) |
//! | `GET /metrics` | | OpenMetrics text |
//! | `GET /api/openapi.json` | | all of this, for programs: [`openapi`] |
//! | `GET /` | | the dashboard |
//!
//! A refusal is one line of text with a 4xx status, or 503 when the registry cannot be written,
//! or another manager leads; in the latter case with `Retry-After`. 504, with `Retry-After`: the
//! order is taken, and is not written yet. `Prefer: wait=N` (RFC 7240) says for how many seconds
//! the answer may wait for that.

use crate::http::openapi;
use crate::http::permission::{ROUTES, call_of};
use crate::http::prefer::Wait;
use crate::http::tls::{Peer, Refused};
use crate::records::ledger::{Ledger, LedgerError};
use crate::registry::{ClusterStatus, Registry, RegistryError};
use crate::removal::RemovalError;
use crate::watching::own_metrics;
use axum::extract::{
    ConnectInfo, DefaultBodyLimit, MatchedPath, Path, Query, RawPathParams, Request, State,
};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post, put};
use axum::{Json, Router};
use hecaton_node::cluster::metrics;
use hecaton_node::cluster::report::{DonorAddress, HeartbeatAnswer, NodeReport, check_name};
use hecaton_node::with_causes;
use hecaton_pki::Credentials;
use hecaton_policy::cluster::choice::Choice;
use serde::Deserialize;
use std::sync::Arc;
use std::time::Duration;

/// Longest body that is read: a report of some hundred consumers.
const MAX_BODY_BYTES: usize = 4 << 20;

/// How long a heartbeat's answer waits until its news is written. Nodes wait 2 s for an answer.
const HEARTBEAT_WAIT: Duration = Duration::from_secs(1);

/// A registry, where it is written down, and the clock that it is told.
#[derive(Clone, Debug)]
pub struct Manager {
    ledger: Arc<Ledger>,
    /// `None`: nobody is asked who they are.
    credentials: Option<Arc<Credentials>>,
}

/// One line of text, with a status of 4xx or 5xx.
#[derive(Debug)]
pub(crate) struct Refusal {
    status: StatusCode,
    text: String,
    /// Nobody leads at present, or not this manager, or a write takes long; in some seconds that
    /// may be otherwise.
    will_pass: bool,
}

impl Refusal {
    pub(crate) fn new(status: StatusCode, text: impl Into<String>) -> Refusal {
        Refusal { status, text: text.into(), will_pass: false }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Refusal { status, text, will_pass } = self;
        match status {
            // The next connection may bring a better certificate.
            StatusCode::UNAUTHORIZED => {
                (status, [(header::CONNECTION, "close")], text).into_response()
            }
            _ if will_pass => (status, [(header::RETRY_AFTER, "1")], text).into_response(),
            _ => (status, text).into_response(),
        }
    }
}

impl From<RegistryError> for Refusal {
    fn from(error: RegistryError) -> Refusal {
        let status = match error {
            RegistryError::Name(_) => StatusCode::BAD_REQUEST,
            RegistryError::OtherName(..)
            | RegistryError::NameTaken { .. }
            | RegistryError::DonorTaken { .. }
            | RegistryError::Superseded { .. } => StatusCode::CONFLICT,
            RegistryError::TooManyNodes => StatusCode::INSUFFICIENT_STORAGE,
        };
        Refusal::new(status, error.to_string())
    }
}

impl From<RemovalError> for Refusal {
    fn from(error: RemovalError) -> Refusal {
        let status = match error {
            RemovalError::Unknown(_) => StatusCode::NOT_FOUND,
            RemovalError::Up { .. }
            | RemovalError::TooEarly { .. }
            | RemovalError::Lends { .. } => StatusCode::CONFLICT,
        };
        Refusal::new(status, error.to_string())
    }
}

impl From<LedgerError> for Refusal {
    fn from(error: LedgerError) -> Refusal {
        let (status, will_pass) = match error {
            LedgerError::NotLeading(_) => (StatusCode::SERVICE_UNAVAILABLE, true),
            LedgerError::Unwritten(_) => (StatusCode::SERVICE_UNAVAILABLE, false),
            LedgerError::Slow(_) => (StatusCode::GATEWAY_TIMEOUT, true),
        };
        Refusal { will_pass, ..Refusal::new(status, with_causes(&error)) }
    }
}

impl Manager {
    /// A manager and its registry.
    pub(crate) fn new(ledger: Arc<Ledger>, credentials: Option<Arc<Credentials>>) -> Manager {
        Manager { ledger, credentials }
    }

    /// Looks at the registry.
    fn see<T>(&self, look: impl FnOnce(&Registry, Duration) -> T) -> Result<T, Refusal> {
        self.ledger.see(look).map_err(Refusal::from)
    }

    /// Changes the registry, and comes back when that is written down; or after so long, with a
    /// refusal that says that it is not yet.
    async fn change<T, E: Into<Refusal>>(
        &self,
        wait: Duration,
        act: impl FnOnce(&mut Registry, Duration) -> Result<T, E>,
    ) -> Result<T, Refusal> {
        self.ledger.change(wait, act).await?.map_err(E::into)
    }

    /// Changes the registry as somebody orders who waits for so long.
    async fn order(
        &self,
        wait: Wait,
        act: impl FnOnce(&mut Registry, Duration),
    ) -> Result<StatusCode, Refusal> {
        let act = |registry: &mut Registry, now| {
            act(registry, now);
            Ok::<(), Refusal>(())
        };
        self.try_order(wait, act).await
    }

    /// The same, if the registry may refuse.
    async fn try_order<E: Into<Refusal>>(
        &self,
        Wait(wait): Wait,
        act: impl FnOnce(&mut Registry, Duration) -> Result<(), E>,
    ) -> Result<StatusCode, Refusal> {
        self.change(wait, act).await.map(|()| StatusCode::NO_CONTENT)
    }

    /// The cluster at this moment.
    pub(crate) fn cluster_status(&self) -> Result<ClusterStatus, Refusal> {
        self.see(Registry::status)
    }

    /// Fails if another manager leads.
    pub(crate) fn check_leads(&self) -> Result<(), Refusal> {
        self.see(|_, _| ())
    }

    /// The routes, with those of the `dashboard`, each for whom the certificates allow it.
    pub(crate) fn router(&self, dashboard: Router) -> Router {
        Router::new()
            .route("/v1/status", get(status))
            .route("/v1/donors", get(donors))
            .route("/v1/donors/{name}/drain", post(drain).delete(stop_draining))
            .route("/v1/donors/{name}/limit", put(limit).delete(lift_limit))
            .route("/v1/nodes/{name}/heartbeat", post(heartbeat))
            .route("/v1/nodes/{name}", delete(farewell))
            .route("/v1/nodes/{name}/remove", post(remove))
            .route("/v1/policy", put(set_policy).delete(lift_policy))
            .route("/v1/harvest-quota", put(set_harvest_quota).delete(lift_harvest_quota))
            .route("/metrics", get(prometheus))
            .route("/api/openapi.json", get(openapi::describe))
            .with_state(self.clone())
            .merge(dashboard)
            .route_layer(from_fn_with_state(self.clone(), authorize))
            .fallback(|| async { (StatusCode::NOT_FOUND, "there is nothing at this path\n") })
            .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
    }
}

/// Lets pass what the peer's certificate allows.
async fn authorize(
    State(manager): State<Manager>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    route: MatchedPath,
    parameters: RawPathParams,
    request: Request,
    next: Next,
) -> Result<Response, Refusal> {
    let name = parameters.iter().find(|(key, _)| *key == "name");
    let name = name.map_or("", |(_, name)| name);
    let call = call_of(request.method(), route.as_str(), name);
    if !ROUTES.iter().any(|(known, ..)| *known == route.as_str()) {
        // Also where nobody is asked who they are: a route that was forgotten there is found by its
        // tests.
        return Err(Refusal::new(StatusCode::FORBIDDEN, "nobody may ask this"));
    }
    if let Some(credentials) = &manager.credentials {
        let Peer::Certified(peer) = peer else {
            return Err(Refusal::new(StatusCode::UNAUTHORIZED, "no certificate was asked for"));
        };
        peer.check(credentials, call).map_err(|refused| match refused {
            Refused::Certificate(reason) => Refusal::new(StatusCode::UNAUTHORIZED, reason),
            Refused::Role(reason) => Refusal::new(StatusCode::FORBIDDEN, reason),
        })?;
    }
    Ok(next.run(request).await)
}

async fn status(State(manager): State<Manager>) -> Result<Json<ClusterStatus>, Refusal> {
    Ok(Json(manager.cluster_status()?))
}

async fn donors(State(manager): State<Manager>) -> Result<Json<Vec<DonorAddress>>, Refusal> {
    Ok(Json(manager.see(Registry::donors)?))
}

async fn drain(
    State(manager): State<Manager>,
    Path(name): Path<String>,
    wait: Wait,
) -> Result<StatusCode, Refusal> {
    manager.try_order(wait, |registry, _| told(registry.drain(&name, true), &name)).await
}

async fn stop_draining(
    State(manager): State<Manager>,
    Path(name): Path<String>,
    wait: Wait,
) -> Result<StatusCode, Refusal> {
    manager.try_order(wait, |registry, _| told(registry.drain(&name, false), &name)).await
}

#[derive(Deserialize)]
struct Limit {
    bytes: u64,
}

async fn limit(
    State(manager): State<Manager>,
    Path(name): Path<String>,
    Query(limit): Query<Limit>,
    wait: Wait,
) -> Result<StatusCode, Refusal> {
    let limit = Some(limit.bytes);
    manager.try_order(wait, |registry, _| told(registry.limit(&name, limit), &name)).await
}

async fn lift_limit(
    State(manager): State<Manager>,
    Path(name): Path<String>,
    wait: Wait,
) -> Result<StatusCode, Refusal> {
    manager.try_order(wait, |registry, _| told(registry.limit(&name, None), &name)).await
}

/// Whether there was a donor to tell.
fn told(exists: bool, name: &str) -> Result<(), Refusal> {
    match exists {
        true => Ok(()),
        false => {
            let text =
                format!("there is no donor `{name}`; `hecaton status` names those there are");
            Err(Refusal::new(StatusCode::NOT_FOUND, text))
        }
    }
}

async fn heartbeat(
    State(manager): State<Manager>,
    Path(name): Path<String>,
    Json(report): Json<NodeReport>,
) -> Result<Json<HeartbeatAnswer>, Refusal> {
    let taken =
        manager.change(HEARTBEAT_WAIT, |registry, now| registry.heartbeat(now, &name, report));
    taken.await.map(Json)
}

#[derive(Deserialize)]
struct Farewell {
    boot: u64,
}

async fn farewell(
    State(manager): State<Manager>,
    Path(name): Path<String>,
    Query(farewell): Query<Farewell>,
    wait: Wait,
) -> Result<StatusCode, Refusal> {
    check_name(&name).map_err(RegistryError::from)?;
    manager.order(wait, |registry, _| registry.farewell(&name, farewell.boot)).await
}

async fn remove(
    State(manager): State<Manager>,
    Path(name): Path<String>,
    wait: Wait,
) -> Result<StatusCode, Refusal> {
    manager.try_order(wait, |registry, now| registry.remove(now, &name)).await
}

async fn set_policy(
    State(manager): State<Manager>,
    wait: Wait,
    Json(choice): Json<Choice>,
) -> Result<StatusCode, Refusal> {
    manager.order(wait, |registry, _| registry.choose(Some(choice))).await
}

async fn lift_policy(State(manager): State<Manager>, wait: Wait) -> Result<StatusCode, Refusal> {
    manager.order(wait, |registry, _| registry.choose(None)).await
}

#[derive(Deserialize)]
struct HarvestQuota {
    machines: u64,
}

async fn set_harvest_quota(
    State(manager): State<Manager>,
    Query(quota): Query<HarvestQuota>,
    wait: Wait,
) -> Result<StatusCode, Refusal> {
    let quota = Some(quota.machines);
    manager.order(wait, |registry, _| registry.set_harvest_quota(quota)).await
}

async fn lift_harvest_quota(
    State(manager): State<Manager>,
    wait: Wait,
) -> Result<StatusCode, Refusal> {
    manager.order(wait, |registry, _| registry.set_harvest_quota(None)).await
}

async fn prometheus(State(manager): State<Manager>) -> Result<Response, Refusal> {
    let status = manager.cluster_status()?;
    let own = own_metrics::render(&status);
    let reports: Vec<_> = status.nodes.into_iter().map(|node| node.report).collect();
    let text = own + &metrics::render(&reports);
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
}
