//! The HTTP API: JSON under `/v1`, metrics for Prometheus under `/metrics`.
//!
//! | request | body | answer |
//! |---|---|---|
//! | `GET /v1/status` | | [`ClusterStatus`](crate::ClusterStatus): the nodes, their donors and consumers |
//! | `GET /v1/donors` | | the donors of the nodes that are up |
//! | `POST /v1/donors/NAME/drain` | | nothing; the donor gives back all that it has lent |
//! | `DELETE /v1/donors/NAME/drain` | | nothing; it goes on lending |
//! | `PUT /v1/donors/NAME/limit?bytes=N` | | nothing; the donor lends no more than that, and has the rest back |
//! | `DELETE /v1/donors/NAME/limit` | | nothing; it lends again all that it has |
//! | `POST /v1/nodes/NAME/heartbeat` | [`NodeReport`] | [`HeartbeatAnswer`] |
//! | `DELETE /v1/nodes/NAME?boot=N` | | nothing; the node says farewell |
//! | `GET /metrics` | | OpenMetrics text |
//!
//! A refusal is one line of text with a 4xx status.

use crate::registry::{Registry, RegistryError};
use axum::extract::{DefaultBodyLimit, Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post, put};
use axum::{Json, Router};
use hecaton_node::metrics;
use hecaton_node::report::{DonorAddress, HeartbeatAnswer, NodeReport};
use serde::Deserialize;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Longest body that is read: a report of some hundred consumers.
const MAX_BODY_BYTES: usize = 4 << 20;

/// A registry and the clock that it is told.
#[derive(Clone, Debug)]
pub struct Manager {
    registry: Arc<Mutex<Registry>>,
    started: Instant,
}

impl Default for Manager {
    fn default() -> Manager {
        Manager { registry: Arc::default(), started: Instant::now() }
    }
}

impl Manager {
    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().expect("no thread panics with the registry")
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// The routes.
    pub fn router(&self) -> Router {
        Router::new()
            .route("/v1/status", get(status))
            .route("/v1/donors", get(donors))
            .route("/v1/donors/{name}/drain", post(drain).delete(stop_draining))
            .route("/v1/donors/{name}/limit", put(limit).delete(lift_limit))
            .route("/v1/nodes/{name}/heartbeat", post(heartbeat))
            .route("/v1/nodes/{name}", delete(farewell))
            .route("/metrics", get(prometheus))
            .fallback(|| async { (StatusCode::NOT_FOUND, "there is nothing at this path\n") })
            .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
            .with_state(self.clone())
    }
}

async fn status(State(manager): State<Manager>) -> Response {
    Json(manager.registry().status(manager.now())).into_response()
}

async fn donors(State(manager): State<Manager>) -> Json<Vec<DonorAddress>> {
    Json(manager.registry().donors(manager.now()))
}

async fn drain(State(manager): State<Manager>, Path(name): Path<String>) -> Response {
    set_draining(&manager, &name, true)
}

async fn stop_draining(State(manager): State<Manager>, Path(name): Path<String>) -> Response {
    set_draining(&manager, &name, false)
}

fn set_draining(manager: &Manager, name: &str, draining: bool) -> Response {
    told(manager.registry().drain(name, draining), name)
}

#[derive(Deserialize)]
struct Limit {
    bytes: u64,
}

async fn limit(
    State(manager): State<Manager>,
    Path(name): Path<String>,
    Query(limit): Query<Limit>,
) -> Response {
    told(manager.registry().limit(&name, Some(limit.bytes)), &name)
}

async fn lift_limit(State(manager): State<Manager>, Path(name): Path<String>) -> Response {
    told(manager.registry().limit(&name, None), &name)
}

/// Whether there was a donor to tell.
fn told(exists: bool, name: &str) -> Response {
    match exists {
        true => StatusCode::NO_CONTENT.into_response(),
        false => {
            let text =
                format!("there is no donor `{name}`; `hecaton status` names those there are");
            (StatusCode::NOT_FOUND, text).into_response()
        }
    }
}

async fn heartbeat(
    State(manager): State<Manager>,
    Path(name): Path<String>,
    Json(report): Json<NodeReport>,
) -> Result<Json<HeartbeatAnswer>, Response> {
    let answer = manager.registry().heartbeat(manager.now(), &name, report);
    answer.map(Json).map_err(|error| {
        let status = match error {
            RegistryError::Name(_) | RegistryError::OtherName(..) => StatusCode::BAD_REQUEST,
            RegistryError::NameTaken { .. } | RegistryError::DonorTaken { .. } => {
                StatusCode::CONFLICT
            }
            RegistryError::TooManyNodes => StatusCode::INSUFFICIENT_STORAGE,
        };
        (status, error.to_string()).into_response()
    })
}

#[derive(Deserialize)]
struct Farewell {
    boot: u64,
}

async fn farewell(
    State(manager): State<Manager>,
    Path(name): Path<String>,
    Query(farewell): Query<Farewell>,
) -> StatusCode {
    manager.registry().farewell(&name, farewell.boot);
    StatusCode::NO_CONTENT
}

async fn prometheus(State(manager): State<Manager>) -> Response {
    let status = manager.registry().status(manager.now());
    let reports: Vec<_> = status.nodes.into_iter().map(|node| node.report).collect();
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], metrics::render(&reports)).into_response()
}
