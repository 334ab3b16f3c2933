//! Whether a waiting call may sleep without its statement's snapshot. A session that keeps a snapshot holds back VACUUM in the whole cluster, and a claim may
//! wait for a minute at a time. The snapshot belongs to the statement, though, and cannot be taken from it; what can be let go is the session's `xmin`, which
//! protects the rows that snapshot sees. That is safe only where nothing reads with it afterwards, so every condition below must hold: the claim is all the
//! statement does, and the statement is all the transaction does.

use pgrx::prelude::*;

/// The elements of a PostgreSQL list of pointers.
unsafe fn nodes<'a>(list: *mut pg_sys::List) -> impl Iterator<Item = *mut pg_sys::Node> + 'a {
    // SAFETY: the caller's list is NIL or a list of pointers that lives as long as the plan.
    unsafe {
        let length = list.as_ref().map_or(0, |list| usize::try_from(list.length).unwrap_or(0));
        (0..length).map(move |at| (*(*list).elements.add(at)).ptr_value.cast::<pg_sys::Node>())
    }
}

unsafe fn is_a(node: *const pg_sys::Node, tag: pg_sys::NodeTag) -> bool {
    // SAFETY: null or a node.
    unsafe { node.as_ref().is_some_and(|node| node.type_ == tag) }
}

/// A constant, a parameter, or one of them under a cast that the parser added.
unsafe fn is_plain(node: *mut pg_sys::Node) -> bool {
    use pg_sys::NodeTag::{T_Const, T_FuncExpr, T_Param, T_RelabelType};
    // SAFETY: each node is read as what its tag says it is.
    unsafe {
        if is_a(node, T_RelabelType) {
            return is_plain((*node.cast::<pg_sys::RelabelType>()).arg.cast());
        }
        if is_a(node, T_FuncExpr) {
            let call = &*node.cast::<pg_sys::FuncExpr>();
            return call.funcformat != pg_sys::CoercionForm::COERCE_EXPLICIT_CALL && nodes(call.args).all(|arg| is_plain(arg));
        }
        is_a(node, T_Const) || is_a(node, T_Param)
    }
}

/// A call of this very function with plain arguments.
unsafe fn is_call(node: *mut pg_sys::Node, function: pg_sys::Oid) -> bool {
    // SAFETY: as above.
    unsafe {
        is_a(node, pg_sys::NodeTag::T_FuncExpr) && {
            let call = &*node.cast::<pg_sys::FuncExpr>();
            call.funcid == function && nodes(call.args).all(|arg| is_plain(arg))
        }
    }
}

/// Whether the plan does nothing but call the function and hand on what it returns: `select * from f(…)` or `select f(…)`.
unsafe fn only_calls(plan: *mut pg_sys::Plan, function: pg_sys::Oid) -> bool {
    use pg_sys::NodeTag::{T_FunctionScan, T_ProjectSet, T_Result, T_Var};
    // SAFETY: as above; every plan node starts with a Plan, every target list holds TargetEntry.
    unsafe {
        let expressions =
            |plan: &pg_sys::Plan| nodes(plan.targetlist).map(|entry| (*entry.cast::<pg_sys::TargetEntry>()).expr.cast::<pg_sys::Node>());
        let bare = |plan: &pg_sys::Plan| plan.qual.is_null() && plan.initPlan.is_null() && plan.righttree.is_null();
        let Some(top) = plan.as_ref() else { return false };
        if is_a(plan.cast(), T_FunctionScan) {
            let mut functions = nodes((*plan.cast::<pg_sys::FunctionScan>()).functions);
            let (first, second) = (functions.next(), functions.next());
            let call = first.map(|function| (*function.cast::<pg_sys::RangeTblFunction>()).funcexpr);
            return bare(top) && second.is_none() && call.is_some_and(|call| is_call(call, function)) && expressions(top).all(|e| is_a(e, T_Var));
        }
        if is_a(plan.cast(), T_ProjectSet) {
            let child = top.lefttree;
            let over_nothing = is_a(child.cast(), T_Result) && bare(&*child) && (*child).lefttree.is_null();
            let nothing_else = expressions(&*child).all(|e| is_plain(e)) && (*child.cast::<pg_sys::Result>()).resconstantqual.is_null();
            return bare(top) && over_nothing && nothing_else && expressions(top).all(|e| is_call(e, function));
        }
        false
    }
}

/// Whether nothing will read with the running statement's snapshot once this function has returned.
pub fn may_let_go(fcinfo: pg_sys::FunctionCallInfo) -> bool {
    // SAFETY: reads this backend's own state; the active portal and its plan live as long as the statement.
    unsafe {
        let function = (*(*fcinfo).flinfo).fn_oid;
        if pg_sys::XactIsoLevel != pg_sys::XACT_READ_COMMITTED as i32
            || pg_sys::IsTransactionBlock()
            || pg_sys::GetCurrentTransactionNestLevel() != 1
            || pg_sys::GetTopTransactionIdIfAny() != pg_sys::InvalidTransactionId
            || !pg_sys::ThereAreNoReadyPortals()
        {
            return false;
        }
        let Some(portal) = pg_sys::ActivePortal.as_ref() else { return false };
        let Some(query) = portal.queryDesc.as_ref() else { return false };
        let Some(statement) = query.plannedstmt.as_ref() else { return false };
        statement.commandType == pg_sys::CmdType::CMD_SELECT
            && !statement.hasModifyingCTE
            && statement.relationOids.is_null()
            && statement.subplans.is_null()
            && statement.rowMarks.is_null()
            && only_calls(statement.planTree, function)
    }
}

/// Lets VACUUM pass until the next statement takes a snapshot. Only where [`may_let_go`].
pub fn let_go() {
    // SAFETY: the session's own entry, as PostgreSQL itself resets it between two statements; the next snapshot sets it again.
    unsafe {
        pg_sys::InvalidateCatalogSnapshot();
        (*pg_sys::MyProc).xmin = pg_sys::InvalidTransactionId;
    }
}
