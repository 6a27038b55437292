// Starts `ucpl lsp` and leaves everything else to it.
"use strict";

const path = require("path");
const vscode = require("vscode");
const { LanguageClient } = require("vscode-languageclient/node");

let client;

function settings() {
  return vscode.workspace.getConfiguration("ucpl");
}

// A command with a slash in it is a path; a relative one starts at the opened folder.
function command() {
  const said = settings().get("command") || "ucpl";
  const folder = vscode.workspace.workspaceFolders && vscode.workspace.workspaceFolders[0];
  return said.includes("/") && !path.isAbsolute(said) && folder ? path.join(folder.uri.fsPath, said) : said;
}

async function start() {
  client = new LanguageClient(
    "ucpl",
    "ucpl",
    { command: command(), args: ["lsp"] },
    {
      documentSelector: [{ language: "ucpl" }],
      initializationOptions: { config: settings().get("config") || "" },
      synchronize: {
        configurationSection: "ucpl",
        fileEvents: vscode.workspace.createFileSystemWatcher("**/{config.json,*.ucpl}"),
      },
    }
  );
  try {
    await client.start();
  } catch (error) {
    vscode.window.showErrorMessage(
      `ucpl: \`${command()} lsp\` did not start. Install ucpl with its extra, pip install '.[lsp]' in its folder, or name it in the setting ucpl.command. (${error})`
    );
  }
}

async function stop() {
  const before = client;
  client = undefined;
  if (before && before.isRunning()) {
    await before.stop();
  }
}

async function activate(context) {
  context.subscriptions.push(
    vscode.commands.registerCommand("ucpl.restart", async () => {
      await stop();
      await start();
    }),
    vscode.workspace.onDidChangeConfiguration(async (event) => {
      if (event.affectsConfiguration("ucpl.command")) {
        await stop();
        await start();
      }
    })
  );
  await start();
}

module.exports = { activate, deactivate: stop };
