//! A router whose routes are all documented.

use std::sync::Arc;

use axum::Router;
use axum::handler::Handler;
use axum::routing::{MethodRouter, delete, get, head, post};
use http::Method;

use super::Operation;
use crate::http::HttpState;

/// The routes of one API, with their documentation.
pub(in crate::http) struct Routes {
    tag: &'static str,
    /// Each route answers without `/v1`, too.
    is_without_v1: bool,
    pub(in crate::http) router: Router<HttpState>,
    /// In the order in which they were added.
    pub(in crate::http) documented: Vec<DocumentedRoute>,
}

pub(in crate::http) struct DocumentedRoute {
    pub(in crate::http) method: Method,
    /// As in the router.
    pub(in crate::http) path: &'static str,
    /// The API that it belongs to, by which `/openapi.json` groups routes.
    pub(super) tag: &'static str,
    pub(super) operation: Operation,
}

impl Routes {
    /// Starts the routes of an API.
    pub(in crate::http) fn of(tag: &'static str) -> Self {
        Routes { tag, is_without_v1: false, router: Router::new(), documented: Vec::new() }
    }

    /// Makes the routes that are added next answer without `/v1`, too, because many clients are configured with a base URL
    /// that lacks it. These paths are not documented.
    pub(in crate::http) fn also_without_v1(self) -> Self {
        Routes { is_without_v1: true, ..self }
    }

    /// Adds a route for GET, which also answers HEAD.
    pub(in crate::http) fn get<H, T>(self, path: &'static str, handler: H, operation: Operation) -> Self
    where
        H: Handler<T, HttpState>,
        T: 'static,
    {
        self.add(Method::GET, path, get(handler), operation)
    }

    /// Adds a route for HEAD alone.
    pub(in crate::http) fn head<H, T>(self, path: &'static str, handler: H, operation: Operation) -> Self
    where
        H: Handler<T, HttpState>,
        T: 'static,
    {
        self.add(Method::HEAD, path, head(handler), operation)
    }

    /// Adds a route for POST.
    pub(in crate::http) fn post<H, T>(self, path: &'static str, handler: H, operation: Operation) -> Self
    where
        H: Handler<T, HttpState>,
        T: 'static,
    {
        self.add(Method::POST, path, post(handler), operation)
    }

    /// Adds a route for DELETE.
    pub(in crate::http) fn delete<H, T>(self, path: &'static str, handler: H, operation: Operation) -> Self
    where
        H: Handler<T, HttpState>,
        T: 'static,
    {
        self.add(Method::DELETE, path, delete(handler), operation)
    }

    fn add(
        mut self,
        method: Method,
        path: &'static str,
        handler: MethodRouter<HttpState>,
        operation: Operation,
    ) -> Self {
        if let Some(path) = path.strip_prefix("/v1").filter(|_| self.is_without_v1) {
            self.router = self.router.route(path, handler.clone());
        }
        self.router = self.router.route(path, handler);
        self.describe(method, path, operation)
    }

    /// Documents a route whose handler is added elsewhere.
    pub(in crate::http) fn describe(mut self, method: Method, path: &'static str, operation: Operation) -> Self {
        self.documented.push(DocumentedRoute { method, path, tag: self.tag, operation });
        self
    }

    /// Adds the routes of another API.
    pub(in crate::http) fn merge(mut self, others: Routes) -> Self {
        self.router = self.router.merge(others.router);
        self.documented.extend(others.documented);
        self
    }

    /// The paths that need no key.
    pub(in crate::http) fn public_paths(&self) -> Arc<[&'static str]> {
        self.paths(|operation| operation.is_public)
    }

    /// The paths that are answered during the shutdown, too.
    pub(in crate::http) fn paths_while_stopping(&self) -> Arc<[&'static str]> {
        self.paths(|operation| operation.is_answered_while_stopping)
    }

    fn paths(&self, is_wanted: fn(&Operation) -> bool) -> Arc<[&'static str]> {
        self.documented.iter().filter(|route| is_wanted(&route.operation)).map(|route| route.path).collect()
    }

    /// `METHOD PATH` of each route that people should know.
    pub(in crate::http) fn listed(&self) -> Vec<String> {
        let listed = self.documented.iter().filter(|route| !route.operation.is_unlisted);
        listed.map(|route| format!("{} {}", route.method, route.path.replace("{*", "{"))).collect()
    }
}
